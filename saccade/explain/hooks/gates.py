"""Turn single tokens down from outside: a factor for every token of a recorded step, 1 as it is, 0 gone.

The same hooks serve both importances: the gradient with respect to the factors, and the change when one is 0.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.explain.hooks.record import reporters
from saccade.tokens.trace import AssignmentTrace


@contextmanager
def gated(model: nn.Module, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply the tokens of step `i`, counted as `record` lists them, by gates[i] (B, M) while the model runs.

    Later modules that group pixels anew by the same assignment (PaCa's blocks share one) make the same tokens again:
    theirs are multiplied too.
    """
    calls = 0
    shared: list[tuple[Tensor, Tensor]] = []  # assignments that travel on, with their gates
    grouping = dict.fromkeys(module for _, module in reporters(model))

    def listen(module: nn.Module, inputs: tuple, output: Any) -> Any:
        nonlocal calls
        if torch._C._current_graph_task_id() != -1:  # a checkpointed block, run again by backward
            return None
        step, calls = calls, calls + 1
        if step not in gates:
            return None
        trace = module.trace(inputs, output)
        if isinstance(trace, AssignmentTrace):
            shared.extend((part, gates[step]) for part in _parts(output) if part is trace.assignment)
        changed = [_turned_down(part, trace.tokens, gates[step]) for part in _parts(output)]
        if all(new is part for new, part in zip(changed, _parts(output), strict=True)):
            raise ValueError(f"{type(module).__name__} does not hand its tokens on, so none can be taken away.")
        return _like(output, changed)

    def follow(module: nn.Module, inputs: tuple, output: Any) -> Any:
        for assignment, factors in shared:
            if any(given is assignment for given in inputs):
                made = [part is not assignment and _is_list(part, factors) for part in _parts(output)]
                parts = zip(_parts(output), made, strict=True)
                return _like(output, [part * factors.to(part.dtype)[..., None] if yes else part for part, yes in parts])
        return None

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            stack.callback(module.register_forward_hook(listen if module in grouping else follow).remove)
        yield


def _turned_down(part: Any, tokens: Tensor | None, gates: Tensor) -> Any:
    """An output (B, …, D) with M or more places in … of which the trace's tokens are all or a slice; else untouched."""
    if not isinstance(part, Tensor) or tokens is None:
        return part
    if part.data_ptr() == tokens.data_ptr() and part.numel() == tokens.numel():
        return part * gates.to(part.dtype).reshape(*part.shape[:-1], 1)
    if part.untyped_storage().data_ptr() != tokens.untyped_storage().data_ptr() or part.ndim != 3:
        return part
    first = (tokens.storage_offset() - part.storage_offset()) // part.stride(1)
    after = part.shape[1] - first - gates.shape[1]
    return part * torch.nn.functional.pad(gates.to(part.dtype), (first, after), value=1.0)[..., None]


def _is_list(part: Any, gates: Tensor) -> bool:
    return isinstance(part, Tensor) and part.ndim == 3 and part.shape[:2] == gates.shape


def _parts(output: Any) -> list[Any]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _like(output: Any, parts: list[Any]) -> Any:
    """The parts in the form of the output they come from."""
    if not isinstance(output, (tuple, list)):
        return parts[0]
    return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
