"""See who attends to whom, from outside: the weights behind every `scaled_dot_product_attention` of a forward pass.

The fused attention never forms its weights. Here its arguments are seen as they pass by, and the weights are
computed beside it, so models stay fast and need no switch. Any model that calls PyTorch's attention can be watched.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from saccade.explain.hooks.record import block_name
from saccade.layers.attention import in_sight


class Attention(NamedTuple):
    """One call: how much each of Q queries takes from each of K keys."""

    weights: Tensor  # (B, heads, Q, K), rows sum to 1
    name: str  # the block it happened in, "stages.0.blocks.1"
    after: int  # traces reported before it, when watched together with `record`


class _Watch(TorchFunctionMode):
    def __init__(self, see: Callable[..., None]):
        super().__init__()
        self.see = see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.see(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def attentions(model: nn.Module, traces: list | None = None, most: int = 1 << 24) -> Iterator[list[Attention]]:
    """Collect the attention of every call while the model runs; calls with more than `most` weights are left out."""
    calls: list[Attention] = []
    inside: list[str] = []  # names of the modules that are running now

    def see(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any):
        if query.shape[:-1].numel() * key.shape[-2] > most:
            return
        scale = options.get("scale") or query.shape[-1] ** -0.5
        scores = (query * scale) @ key.transpose(-2, -1)
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
        weights = scores.float().softmax(-1)
        if weights.ndim == 3:  # one head, without an axis for it
            weights = weights.unsqueeze(1)
        calls.append(Attention(weights, block_name(inside[-1]) if inside else "", len(traces or [])))

    def leave(*_: Any) -> None:  # a hook that returned the name would replace the output by it
        inside.pop()

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(in_sight())  # no kernel that keeps its weights to itself
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(_Watch(see))
        yield calls
