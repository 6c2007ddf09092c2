"""A compiler knows our operators when it meets them, and makes no note of what leads there."""

import sys

import pytest
import torch
from torch.library import custom_op

from saccade.kernels import known


def make(name):
    def negate(x: torch.Tensor) -> torch.Tensor:
        return -x

    return custom_op(f"saccade_test::{name}", negate, mutates_args=())


def test_a_described_operator_is_no_surprise(monkeypatch):
    from torch._inductor import exc

    monkeypatch.setattr(known, "NOTES", True)
    noted, write = [], exc.OperatorIssue.operator_str
    monkeypatch.setattr(
        exc.OperatorIssue,
        "operator_str",
        staticmethod(lambda target, *rest: noted.append(str(target)) or write(target, *rest)),
    )
    op = make("described")
    known.describe(op, torch.empty_like)
    x = torch.randn(3, 4)
    assert torch.equal(torch.compile(lambda x: op(x * 2) + 1, fullgraph=True)(x), 1 - 2 * x)
    assert not any("described" in note for note in noted)


def test_without_a_compiler_nothing_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.lowering", raising=False)
    known.introduce(make("alone")._opoverload)
    assert "torch._inductor.lowering" not in sys.modules


@pytest.mark.parametrize("problem", [AttributeError, TypeError])
def test_a_compiler_of_another_year_makes_its_note(monkeypatch, problem):
    class Lowering:
        lowerings = ()

        def make_fallback(self, *_, **__):
            raise problem

        def tag_to_layout_constraint(self, tag):
            return None

    monkeypatch.setitem(sys.modules, "torch._inductor.lowering", Lowering())
    known.introduce(make(f"later_{problem.__name__}")._opoverload)
