"""Turn single tokens down from outside: a factor for every token of a recorded step, 1 as it is, 0 gone.

The same hooks serve both importances: the gradient with respect to the factors, and the change when one is 0.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saccade.explain.record import reporters
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
            shared.extend((part, gates[step]) for part in _parts(output) if _same_memory(part, trace.assignment))
        if not any(_same_memory(part, trace.tokens) for part in _parts(output)):
            raise ValueError(f"{type(module).__name__} does not hand its tokens on, so none can be taken away.")
        return _scaled(output, gates[step], lambda part: _same_memory(part, trace.tokens))

    def follow(module: nn.Module, inputs: tuple, output: Any) -> Any:
        for assignment, factors in shared:
            if any(given is assignment for given in inputs):
                return _scaled(output, factors, partial(_is_tokens, shape=factors.shape), assignment)
        return None

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            stack.callback(module.register_forward_hook(listen if module in grouping else follow).remove)
        yield


def _scaled(output: Any, gates: Tensor, chosen: Any, but: Tensor | None = None) -> Any:
    """The module's output with the chosen tensors (B, …, D), M places in …, multiplied token by token."""
    parts = [
        part * gates.to(part.dtype).reshape(*part.shape[:-1], 1)
        if isinstance(part, Tensor) and part is not but and chosen(part)
        else part
        for part in _parts(output)
    ]
    if not isinstance(output, (tuple, list)):
        return parts[0]
    return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)


def _parts(output: Any) -> list[Any]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _is_tokens(part: Tensor, shape: torch.Size) -> bool:
    return part.ndim == 3 and part.shape[:2] == shape


def _same_memory(part: Any, tensor: Tensor | None) -> bool:
    if not isinstance(part, Tensor) or tensor is None:
        return False
    return part.data_ptr() == tensor.data_ptr() and part.numel() == tensor.numel()
