"""Scale single tokens with forward hooks: one factor per token of a recorded step, 1 unchanged, 0 removed.

Both kinds of importance use them: the gradient with respect to the factors, and the change when one factor is 0.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.explanation.hooks.record import grouping_modules, is_recomputation, trace_call
from saccade.tokens.trace import AssignmentTrace


@contextmanager
def gated(model: nn.Module, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply the tokens of step `i`, counted as `record` lists them, by gates[i] (B, M) while the model runs.

    Later modules that group pixels with the same assignment (PaCa shares one among the blocks of a stage) compute the
    same tokens again; those are scaled too.
    """
    calls = 0
    shared: list[tuple[Tensor, Tensor]] = []  # assignments that later modules use again, with their gates
    executed: dict[nn.Module, list[int]] = {module: [] for _, module in grouping_modules(model)}  # steps per module

    def scale_tokens(module: nn.Module, inputs: tuple, output: Any) -> Any:
        nonlocal calls
        if is_recomputation():  # activation checkpointing: backward recomputes the calls of a module last first
            step = executed[module].pop()
        else:
            step, calls = calls, calls + 1
            executed[module].append(step)
        if step not in gates:
            return None
        trace = trace_call(module, inputs, output)
        if isinstance(trace, AssignmentTrace):
            shared.extend((part, gates[step]) for part in _parts(output) if part is trace.assignment)
        scaled = [_scaled(part, trace.tokens, gates[step]) for part in _parts(output)]
        if all(new is part for new, part in zip(scaled, _parts(output), strict=True)):
            raise ValueError(
                f"expected {type(module).__name__} to return the tokens of its trace, got none. Return them unchanged."
            )
        return _like(output, scaled)

    def scale_regrouped(module: nn.Module, inputs: tuple, output: Any) -> Any:
        for assignment, factors in shared:
            if any(value is assignment for value in inputs):
                parts = [
                    part * factors.to(part.dtype)[..., None]
                    if part is not assignment and _has_tokens(part, factors)
                    else part
                    for part in _parts(output)
                ]
                return _like(output, parts)
        return None

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            hook = scale_tokens if module in executed else scale_regrouped
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def _scaled(part: Any, tokens: Tensor | None, gates: Tensor) -> Any:
    """An output (B, …, D) that holds the trace's tokens, all of it or a slice, times the gates; others unchanged."""
    if not isinstance(part, Tensor) or tokens is None:
        return part
    if part.data_ptr() == tokens.data_ptr() and part.numel() == tokens.numel():
        return part * gates.to(part.dtype).reshape(*part.shape[:-1], 1)
    if part.untyped_storage().data_ptr() != tokens.untyped_storage().data_ptr() or part.ndim != 3:
        return part
    first = int(tokens.storage_offset() - part.storage_offset()) // part.stride(1)
    after = part.shape[1] - first - gates.shape[1]
    return part * torch.nn.functional.pad(gates.to(part.dtype), (first, after), value=1.0)[..., None]


def _has_tokens(part: Any, gates: Tensor) -> bool:
    return isinstance(part, Tensor) and part.ndim == 3 and part.shape[:2] == gates.shape


def _parts(output: Any) -> list[Any]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _like(output: Any, parts: list[Any]) -> Any:
    """The parts in the container type of `output`."""
    if not isinstance(output, (tuple, list)):
        return parts[0]
    return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
