"""The fused super token steps against their twins, forward and backward, at sizes the cell does not divide."""

import pytest
import torch

from saccade.kernels import HAS_TRITON, enabled
from saccade.tokens import super_tokens as twins

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter
SIZES = [(2, 20, 9, 7, 4), (1, 8, 7, 5, 2)]
SIZES += [(4, 64, 56, 56, 8), (4, 128, 28, 28, 4), (2, 96, 61, 47, 8)] if DEVICE == "cuda" else []


def both_ways(size, dtype):
    """Tokens, association, what is put back, and the gradient of the map: fused, and by the twins in float64."""
    from saccade.kernels import super_tokens as kernels

    batch, channels, height, width, cell = size
    generator = torch.Generator().manual_seed(channels)
    x, g = (torch.randn(batch, channels, height, width, generator=generator).to(DEVICE, dtype) for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    tokens, association = kernels.group(x.permute(0, 2, 3, 1), cell, 1e-12)
    back = kernels.spread(2 * tokens, association, cell, height, width).permute(0, 3, 1, 2)
    fused = tokens, association, back, *torch.autograd.grad(back, x, g)
    with enabled(False):
        exact = x.detach().double().requires_grad_()
        tokens, association = twins.SuperTokenizer(cell)(exact)
        back = twins.spread(2 * tokens, association, cell, height, width)
    return fused, (tokens, association, back, *torch.autograd.grad(back, exact, g.double()))


@pytest.mark.parametrize("size", SIZES)
def test_equals_its_twin_in_float32(size):
    for ours, twin in zip(*both_ways(size, torch.float32), strict=True):
        assert ours.shape == twin.shape
        assert (ours.double() - twin).norm() < 1e-5 * twin.norm()


@pytest.mark.parametrize("size", SIZES)
def test_equals_its_twin_in_half_precision(size):
    half = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
    for ours, twin in zip(*both_ways(size, half), strict=True):
        assert (ours.double() - twin).norm() < 1e-2 * twin.norm()
