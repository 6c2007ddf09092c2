"""Global, window and super token attention of one position (SViT Fig. 2b-d), and its redundancy (Sec. 3.2.4).

Baselines are timm models whose first attention is among all patches (ViT, DeiT) or inside windows (Swin).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade._errors import UsageError
from saccade.data.transforms.batch import normalize
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.figures.svit import draw_anchor, effective_attention
from saccade.explanation.hooks.attention import record_attention
from saccade.explanation.images import View
from saccade.explanation.observe import Step, eval_mode
from saccade.models.card import preprocess_of


class AnchorAttention(NamedTuple):
    """The first attention of a model: the row of one position, and how much of it is redundant."""

    model: str
    kind: str  # "global", "window" or "super token"
    map: Tensor  # (H, W), mean of the heads; zeros outside a window
    keys: int  # positions or tokens that a query is compared with
    redundancy: float


def redundancy(weights: Tensor) -> float:
    """1 - exp(entropy) / keys of attention weights (..., K), mean over all rows.

    The part of the comparisons that does not count: 0 if a query takes the same from all keys, 1 - 1 / K if from one.
    """
    entropy = torch.special.entr(weights.double()).sum(-1)
    return 1 - (entropy.exp() / weights.shape[-1]).mean().item()


def super_token_attention(step: Step, anchor: tuple[float, float], model_name: str) -> AnchorAttention:
    """The attention of SViT's step through association, super tokens and upsampling."""
    attention = effective_attention(step, anchor).mean(0)
    assert step.attention is not None  # effective_attention checks
    return AnchorAttention(model_name, "super token", attention, step.count, redundancy(step.attention.weights[0]))


@torch.no_grad()
def baseline_attention(model: nn.Module | str, image: Tensor, anchor: tuple[float, float]) -> AnchorAttention:
    """The first attention of a timm ViT or Swin, a module or a name (with pretrained weights), on an image (3, H, W).

    The image is resized to the model's square input.
    """
    name = model if isinstance(model, str) else getattr(model, "pretrained_cfg", {}).get("architecture", "model")
    module: Any = timm.create_model(model, pretrained=True) if isinstance(model, str) else model
    own, side = preprocess_of(module), _input_side(module)
    images = F.interpolate(image[None], (side, side), mode="bicubic", antialias=True).clamp(0, 1)
    images = normalize(images, own.mean, own.std).to(next(module.parameters()))
    with eval_mode(module), _fused_attention(module), record_attention(module) as calls:
        module(images)
    if not calls or not hasattr(module, "patch_embed"):
        raise UsageError(f"expected a ViT or Swin of timm to compare with, got {name}, which records no attention.")
    rows, columns = module.patch_embed.grid_size
    row, column = min(int(anchor[1] * rows), rows - 1), min(int(anchor[0] * columns), columns - 1)
    weights = calls[0].weights  # (B or windows, heads, Q, K)
    prefix = getattr(module, "num_prefix_tokens", 0)
    if weights.shape[0] == 1 and weights.shape[-1] == rows * columns + prefix:
        attention = weights[0, :, prefix + row * columns + column, prefix:].mean(0)
        return AnchorAttention(name, "global", attention.unflatten(0, (rows, columns)), weights.shape[-1],
                               redundancy(weights[0, :, prefix:]))  # fmt: skip
    window = round(weights.shape[-1] ** 0.5)
    if window**2 != weights.shape[-1] or weights.shape[0] * window**2 != rows * columns:
        raise ValueError(
            f"expected attention of all patches or of square windows, got {tuple(weights.shape)} in {name}."
        )
    top, left = row // window * window, column // window * window
    inside = weights[top // window * (columns // window) + left // window, :, row % window * window + column % window]
    attention = inside.new_zeros(rows, columns)
    attention[top : top + window, left : left + window] = inside.mean(0).unflatten(0, (window, window))
    return AnchorAttention(name, "window", attention, weights.shape[-1], redundancy(weights))


@contextmanager
def _fused_attention(model: nn.Module) -> Iterator[None]:
    """Let timm's attention layers call PyTorch's `scaled_dot_product_attention`, which Swin does on request only."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "fused_attn")]
    before = [layer.fused_attn for layer in layers]
    for layer in layers:
        layer.fused_attn = True
    try:
        yield
    finally:
        for layer, fused in zip(layers, before, strict=True):
            layer.fused_attn = fused


def _input_side(model: Any) -> int:
    size = getattr(model.patch_embed, "img_size", None) if hasattr(model, "patch_embed") else None
    return size[0] if size else preprocess_of(model).size


def comparison_figure(view: View, rows: Sequence[AnchorAttention], anchor: tuple[float, float]) -> Figure:
    """SViT Fig. 2b-d: one map per model, relative to its maximum, with the anchor in a green square."""
    panels = []
    for row in rows:
        maps = F.interpolate(row.map[None, None].float(), view.canvas.shape[:2], mode="bilinear")[0, 0]
        drawn = draw_anchor(view.canvas, maps.cpu().numpy(), anchor)
        caption = f"{row.kind} attention, {row.keys} keys, redundancy {row.redundancy:.0%}"
        panels.append(Panel(drawn, row.model, caption))
    return Figure(
        "attention",
        "What one position attends to, in the first attention of each model",
        "Attention of the position in the green square, mean of the heads; full red is each map's maximum. Redundancy "
        "is the part of the compared keys that does not count: 1 - exp(entropy) / keys, mean over queries and heads.",
        panels,
        columns=min(len(panels), 4),
    )
