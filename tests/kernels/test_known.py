"""A compiler knows our operators when it meets them, and makes no note of what leads there."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import custom_op

from saccade.kernels import HAS_TRITON, known


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


@pytest.mark.skipif(not HAS_TRITON, reason="the operators are Triton's")
def test_what_stands_behind_a_resnet_is_introduced(monkeypatch):
    from saccade.kernels import few_keys, grouped_linear, token_attention

    met = []
    monkeypatch.setattr(known, "NOTES", True)
    monkeypatch.setattr(known, "introduce", lambda overload: met.append(overload.name()))
    with FakeTensorMode():
        rows, tokens, both = torch.empty(6, 32), torch.empty(1, 6, 32), torch.empty(1, 9, 64)
        assert grouped_linear._op(rows, torch.empty(2, 16, 32), None).shape == (6, 64)
        assert few_keys._op(tokens, both, 2, 0.25).shape == (1, 6, 32)
        assert token_attention._pixels_op(tokens, both, 2, 0.25).shape == (1, 6, 32)
        assert token_attention._tokens_op(torch.empty(1, 6, 64), tokens, 2).shape == (1, 6, 32)
    assert [name.split("::")[1] for name in met] == ["grouped_linear", "few_keys", "ask_pixels", "ask_each_other"]
