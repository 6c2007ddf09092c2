"""The LayerNorm of short rows against the library's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from saccade.kernels import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is no kernel to compare")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs in Triton's interpreter


@pytest.mark.parametrize("shape", [(3, 70, 40), (1, 5, 5, 96), (2, 1, 300)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_equals_the_library(shape, dtype, tolerance):
    from saccade.kernels.layer_norm import layer_norm

    generator = torch.Generator().manual_seed(shape[1])
    x, g = (torch.randn(shape, generator=generator).add(1).to(DEVICE, dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], generator=generator).to(DEVICE).requires_grad_() for _ in range(2))
    x.requires_grad_()
    ours = layer_norm(x, weight, bias, 1e-6)
    exact = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-6)
    pairs = [(ours, exact)]
    pairs += zip(
        torch.autograd.grad(ours, [x, weight, bias], g),
        torch.autograd.grad(exact, [x, weight, bias], g.double()),
        strict=True,
    )
    for a, b in pairs:
        assert (a.double() - b.double()).norm() < tolerance * b.double().norm()


@pytest.mark.parametrize("size", [(2, 40, 5, 3), (3, 16, 1, 1), (1, 24, 1, 7)])
def test_a_map_is_normed_as_it_lies_in_memory(size):
    from saccade.kernels.layer_norm import channel_norm

    generator = torch.Generator().manual_seed(sum(size))
    x, g = (torch.randn(size, generator=generator).to(DEVICE) for _ in range(2))
    weight, bias = (torch.randn(size[1], generator=generator).to(DEVICE).requires_grad_() for _ in range(2))
    features = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    x.requires_grad_()
    ours = channel_norm(features, weight, bias, 1e-6)
    theirs = F.layer_norm(x.permute(0, 2, 3, 1), size[1:2], weight, bias, 1e-6).permute(0, 3, 1, 2)
    assert ours.stride() == features.stride()
    pairs = [(ours, theirs)]
    pairs += zip(  # g is not channels-last
        torch.autograd.grad(ours, [features, weight, bias], g),
        torch.autograd.grad(theirs, [x, weight, bias], g),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 70, 40), (1, 5, 5, 96), (2, 1, 300)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_sum_in_front_is_part_of_it(shape, dtype, tolerance):
    from saccade.kernels.layer_norm import _add_op, add_norm

    generator = torch.Generator().manual_seed(shape[1])
    x, d = (torch.randn(shape, generator=generator).add(1).to(DEVICE, dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], generator=generator).to(DEVICE) for _ in range(2))
    total, y = add_norm(x, d, weight, bias, 1e-6)
    torch.testing.assert_close(total, x + d, rtol=tolerance, atol=tolerance)  # the interpreter cuts where others round
    exact = F.layer_norm((x + d).double(), shape[-1:], weight.double(), bias.double(), 1e-6)
    assert (y.double() - exact).norm() < tolerance * exact.norm()
    torch.library.opcheck(_add_op, (x, d, weight, bias, 1e-6))


@pytest.mark.parametrize("shape", [(3, 70, 40), (1, 5, 5, 96)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_so_is_the_bias_of_a_convolution(shape, dtype, tolerance):
    from saccade.kernels.layer_norm import _bias_op, bias_norm

    generator = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    d, weight, bias = (torch.randn(shape[-1], generator=generator).to(DEVICE) for _ in range(3))
    exact = F.layer_norm(x.double() + d.double(), shape[-1:], weight.double(), bias.double(), 1e-6)
    assert (bias_norm(x, d, weight, bias, 1e-6).double() - exact).norm() < tolerance * exact.norm()
    torch.library.opcheck(_bias_op, (x, d, weight, bias, 1e-6))
