"""LayerNorm over the last axis, many short rows to a program.

The library gives every row its own block, which suits the long rows of language models; the rows here are 32 to 1024
channels of a pixel, and there are hundreds of thousands of them. Weights are read as they are stored, so nothing is
cast beforehand. Backward computes the gradient of the input and partial sums for weight and bias in one pass.
"""

import torch
from torch import Tensor

from saccade.kernels import HAS_TRITON, learns
from saccade.kernels.launch import launch, launched_directly

PROGRAMS = 528  # of the backward pass: four for every multiprocessor of an H200, each walking over many rows

if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import triton_op

    @triton.jit
    def _forward_kernel(
        x_pointer, w_pointer, b_pointer, y_pointer, m_pointer, r_pointer, rows, channels, eps,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        channel = tl.arange(0, CHANNELS)[None, :]
        mask = (row < rows)[:, None] & (channel < channels)
        offset = row.to(tl.int64)[:, None] * channels + channel
        x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, 1) / channels
        x = tl.where(mask, x - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / channels + eps)
        weight = tl.load(w_pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
        bias = tl.load(b_pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
        y = x * scale[:, None] * weight + bias
        tl.store(y_pointer + offset, y.to(y_pointer.dtype.element_ty), mask=mask)
        tl.store(m_pointer + row, mean, mask=row < rows)
        tl.store(r_pointer + row, scale, mask=row < rows)

    @triton.jit
    def _backward_kernel(
        g_pointer, x_pointer, w_pointer, m_pointer, r_pointer, d_pointer, p_pointer, rows, channels, step,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        channel = tl.arange(0, CHANNELS)[None, :]
        held = channel < channels
        weight = tl.load(w_pointer + channel, mask=held, other=0.0).to(tl.float32)
        to_weight = tl.zeros((ROWS, CHANNELS), tl.float32)
        to_bias = tl.zeros((ROWS, CHANNELS), tl.float32)
        for first in range(tl.program_id(0) * ROWS, rows, step):
            row = first + tl.arange(0, ROWS)
            mask = (row < rows)[:, None] & held
            offset = row.to(tl.int64)[:, None] * channels + channel
            g = tl.load(g_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(m_pointer + row, mask=row < rows, other=0.0)[:, None]
            scale = tl.load(r_pointer + row, mask=row < rows, other=0.0)[:, None]
            x = tl.where(mask, (x - mean) * scale, 0.0)
            to_weight += g * x
            to_bias += g
            g = g * weight
            along = tl.sum(g * x, 1)[:, None] / channels
            level = tl.sum(g, 1)[:, None] / channels
            tl.store(d_pointer + offset, ((g - x * along - level) * scale).to(d_pointer.dtype.element_ty), mask=mask)
        target = p_pointer + tl.program_id(0) * 2 * channels + channel
        tl.store(target, tl.sum(to_weight, 0)[None, :], mask=held)
        tl.store(target + channels, tl.sum(to_bias, 0)[None, :], mask=held)

    def _tile(channels: int) -> dict[str, int]:
        """Rows and channels of a program; few threads where a row is long, so that each sums more of it."""
        width = triton.next_power_of_2(channels)
        elements, warps = (2048, 4) if width < 512 else (1024, 2)
        return dict(ROWS=max(1, elements // width), CHANNELS=width, num_warps=warps)

    def _gradient_tile(channels: int) -> dict[str, int]:
        """The same for gradients, of which short rows leave a thread more to carry."""
        width = triton.next_power_of_2(channels)
        return dict(ROWS=max(1, 2048 // width), CHANNELS=width, num_warps=8 if width < 512 else 4)

    def _forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """x (…, C), contiguous -> y (…, C), and mean and scale of every row."""
        channels = x.shape[-1]
        rows = x.numel() // channels
        tile = _tile(channels)
        y = torch.empty_like(x)
        mean, scale = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        launch(_forward_kernel, grid, x, weight, bias, y, mean, scale, rows, channels, eps, **tile)
        return y, mean, scale

    def _gradients(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of x, and (2, C) of weight and bias."""
        channels = x.shape[-1]
        rows = x.numel() // channels
        tile = _gradient_tile(channels)
        programs = min(PROGRAMS, triton.cdiv(rows, tile["ROWS"]))
        g_x = torch.empty_like(x)
        partial = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
        launch(
            _backward_kernel, (programs,), g, x, weight, mean, scale, g_x, partial, rows, channels,
            programs * tile["ROWS"], **tile,
        )  # fmt: skip
        return g_x, partial.sum(0)

    class _LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
            with launched_directly():
                output = _forward(x, weight, bias, eps)
            _save(ctx, (x, weight, bias, eps), output)
            return output

        @staticmethod
        def backward(ctx, g: Tensor, *_):
            with launched_directly():
                return _backward(ctx, g, gradients=_gradients)

    _op = triton_op("saccade::layer_norm", _forward, mutates_args={})
    _gradients_op = triton_op("saccade::layer_norm_backward", _gradients, mutates_args={})

    def _save(ctx, inputs, output) -> None:
        x, weight, _, _ = inputs
        _, mean, scale = output
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.mark_non_differentiable(mean, scale)

    def _backward(ctx, g: Tensor, *_, gradients=_gradients_op):
        x, weight, mean, scale = ctx.saved_tensors
        g_x, shared = gradients(g.contiguous(), x, weight, mean, scale)
        return g_x, shared[0].to(weight.dtype), shared[1].to(weight.dtype), None

    _op.register_autograd(_backward, setup_context=_save)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (…, C), contiguous -> y (…, C)."""
    if torch.compiler.is_compiling():
        return _op(x, weight, bias, eps)[0]
    if learns(x, weight, bias):
        return _LayerNorm.apply(x, weight, bias, eps)[0]
    with launched_directly():
        return _forward(x, weight, bias, eps)[0]
