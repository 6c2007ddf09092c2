"""Record the attention weights of every `scaled_dot_product_attention` call of a forward pass.

Fused attention never materialises its weights. A `TorchFunctionMode` sees the arguments of each call and computes the
weights separately, so models need no flag and any model that calls PyTorch's attention can be recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from saccade.explanation.hooks.record import block_name
from saccade.ops import enabled


class Attention(NamedTuple):
    """Weights of one attention call: how much each of Q queries takes from each of K keys."""

    weights: Tensor  # (B, heads, Q, K), rows sum to 1
    name: str  # block that contains the call, "stages.0.blocks.1"
    num_traces: int  # traces recorded before the call, when run together with `record`


class _AttentionMode(TorchFunctionMode):
    def __init__(self, on_call: Callable[..., None]):
        super().__init__()
        self.on_call = on_call

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.on_call(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def record_attention(
    model: nn.Module, traces: list | None = None, max_weights: int = 1 << 24
) -> Iterator[list[Attention]]:
    """Collect the weights of every attention call while the model runs, except calls with more than `max_weights`."""
    calls: list[Attention] = []
    running: list[str] = []  # names of the modules whose forward is running, outermost first

    def on_call(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **options: Any):
        if query.shape[:-1].numel() * key.shape[-2] > max_weights:
            return
        scale = options.get("scale") or query.shape[-1] ** -0.5
        scores = (query * scale) @ key.transpose(-2, -1)
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
        weights = scores.float().softmax(-1)
        if weights.ndim == 3:  # one head, without a head axis
            weights = weights.unsqueeze(1)
        calls.append(Attention(weights, block_name(running[-1]) if running else "", len(traces or [])))

    def leave(*_: Any) -> None:  # returning the popped name would replace the module's output
        running.pop()

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(enabled(False))  # no fused kernel that bypasses scaled_dot_product_attention
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(_AttentionMode(on_call))
        yield calls
