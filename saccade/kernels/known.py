"""Operators that PyTorch's compiler is told about before it meets them.

At the first meeting it makes a note for its log, of all that leads to the operator, whether somebody reads the log or
not (up to torch 2.12). Every shortcut on the way doubles the note: behind the thirteen blocks of a ResNet it takes
minutes. What a compiler knows beforehand needs no note.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

NOTES = tuple(int(number) for number in torch.__version__.split(".")[:2]) <= (2, 12)


def describe(op: Any, fake: Callable[..., Any]) -> None:
    """Tell how large the answers of a custom operator are, and a compiler that asks, that it is one."""

    def answer(*inputs):
        if NOTES:
            introduce(op._opoverload)
        return fake(*inputs)

    op.register_fake(answer)


def introduce(overload: Any) -> None:
    """What the compiler does at its first meeting, without the note; nothing where no such compiler is at work."""
    lowering = sys.modules.get("torch._inductor.lowering")
    try:
        if lowering is None or overload in lowering.lowerings:
            return
        tag = torch._library.utils.get_layout_constraint_tag(overload, with_default=True)
        lowering.make_fallback(overload, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
    except (AttributeError, ImportError, TypeError):  # another version's: then it makes its note
        return
