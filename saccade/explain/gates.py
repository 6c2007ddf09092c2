"""Turn single tokens down from outside: a factor for every token of a recorded step, 1 as it is, 0 gone.

The same hooks serve both importances: the gradient with respect to the factors, and the change when one is 0.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.explain.record import reporters
from saccade.tokens.trace import AssignmentTrace, Trace


@contextmanager
def gated(model: nn.Module, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply the tokens of step `i`, counted as `record` lists them, by gates[i] (B, M) while the model runs."""
    calls = 0

    def listen(module: nn.Module, inputs: tuple, output: Any) -> Any:
        nonlocal calls
        if torch._C._current_graph_task_id() != -1:  # a checkpointed block, run again by backward
            return None
        step, calls = calls, calls + 1
        if step not in gates:
            return None
        return _turn_down(output, module.trace(inputs, output), gates[step], type(module).__name__)

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for _, module in reporters(model):
            stack.callback(module.register_forward_hook(listen).remove)
        yield


def _turn_down(output: Any, trace: Trace, gates: Tensor, reporter: str) -> Any:
    """Find the tokens in what the module returned (the trace shares their memory), and scale them there."""
    parts = list(output) if isinstance(output, (tuple, list)) else [output]
    for i, part in enumerate(parts):
        if _same(part, trace.tokens):
            parts[i] = part * gates.to(part.dtype).reshape(*part.shape[:-1], 1)  # (B, …, D), … is M places
            break
    else:
        # No tokens among the outputs: they are made later, as assignment times pixels, so a row of zeros removes one.
        assignment = trace.assignment if isinstance(trace, AssignmentTrace) else None
        for i, part in enumerate(parts):
            if _same(part, assignment):
                tokens_first = part.shape[1] == gates.shape[1]
                parts[i] = part * (gates.unsqueeze(2) if tokens_first else gates.unsqueeze(1)).to(part.dtype)
                break
        else:
            raise ValueError(f"{reporter} does not hand its tokens or their assignment on, so none can be taken away.")
    if not isinstance(output, (tuple, list)):
        return parts[0]
    return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)


def _same(part: Any, tensor: Tensor | None) -> bool:
    if not isinstance(part, Tensor) or tensor is None:
        return False
    return part.data_ptr() == tensor.data_ptr() and part.numel() == tensor.numel()
