"""What follows a convolution in one pass over its output: bias, activation, batch norm with fixed statistics.

The library adds a convolution's bias in a pass of its own at half the memory's speed, then makes one for each of the
others. In place: the map is the fresh output of a convolution that nobody else reads. For inference.
"""

import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import HAS_TRITON
from saccade.kernels.launch import Launch, planned
from saccade.kernels.norm_relu import Norm

ACTS = {"": 0, "gelu": 1, "silu": 2}


def epilogue_twin(features: Tensor, bias: Tensor | None, act: str = "", norm: Norm | None = None) -> Tensor:
    """norm(act(features + bias)), features (B, C, H, W)."""
    if bias is not None:
        features = features + bias.to(features.dtype).view(-1, 1, 1)
    features = F.gelu(features) if act == "gelu" else F.silu(features) if act == "silu" else features
    return features if norm is None else norm.apply(features)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from saccade.kernels.gelu import gelu
    from saccade.kernels.norm_relu import _affine, _pointers
    from saccade.kernels.rows import cut, place

    @triton.jit
    def _epilogue_kernel(
        x_pointer, c_pointer, w_pointer, b_pointer, m_pointer, v_pointer, rows, channels, eps,
        BIAS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        channel, held, offset, mask = place(rows, channels, ROWS, CHANNELS)
        x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(c_pointer + channel, mask=held, other=0.0).to(tl.float32)
        if ACT == 1:
            x = gelu(x, x_pointer.dtype.element_ty == tl.float32)
        if ACT == 2:
            x = x / (1 + tl.exp(-x))
        gain, shift = _affine(w_pointer, b_pointer, m_pointer, v_pointer, channel, held, eps, NORM)
        tl.store(x_pointer + offset, (x * gain + shift).to(x_pointer.dtype.element_ty), mask=mask)

    @planned
    def _finishing(rows: int, channels: int, eps: float, bias: bool, act: str, kind: int) -> Launch:
        grid, tile = cut(rows, channels)
        return Launch(_epilogue_kernel, grid, rows, channels, eps, BIAS=bias, ACT=ACTS[act], NORM=kind, **tile)


def epilogue(features: Tensor, bias: Tensor | None, act: str = "", norm: Norm | None = None) -> Tensor:
    """norm(act(features + bias)), written over `features`; (B, C, H, W), channels-last in memory."""
    channels = features.shape[1]
    kind, pointers = _pointers(norm, features)
    eps = 0.0 if norm is None else norm.eps
    start = _finishing(features.numel() // channels, channels, eps, bias is not None, act, kind)
    start(features, features if bias is None else bias, *pointers)
    return features
