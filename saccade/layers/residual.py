"""What stands between convolutions, in as few passes as can be: bias, activation, norm, sum, pooling."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.kernels import allowed, suits
from saccade.kernels import epilogue as epilogues
from saccade.kernels import norm_relu as kernels
from saccade.kernels import pool as pooling
from saccade.kernels.pool import PixelNorm
from saccade.layers.batch_norm import ChannelAffine, heard, plain

NORMS = (nn.BatchNorm2d, ChannelAffine, nn.Identity)  # the last two are what a folded norm leaves


def fits_inference(
    features: Tensor, convs: Sequence[nn.Module], norms: Sequence[nn.Module], shortcut: nn.Sequential | None = None
) -> bool:
    """Whether the fused pass takes these: inference on a GPU, norms whose statistics are fixed, or folded away.

    `shortcut` is a convolution and a norm more. A layer that somebody listens to must be called itself.
    """
    if not isinstance(features, Tensor) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not suits(features) or not allowed("norm_relu"):
        return False
    convs, norms = (*convs, *(shortcut or ())[:1]), (*norms, *(shortcut or ())[1:])
    known = all(type(conv) is nn.Conv2d for conv in convs) and all(type(norm) in NORMS for norm in norms)
    return known and not heard((*convs, *norms)) and not any(norm.training for norm in norms)


def fits_training(features: Tensor, norms: Sequence[nn.Module], acts: Sequence[nn.Module]) -> bool:
    """Whether norms of a block may learn together with what stands behind them: on a GPU, heard by nobody."""
    if not isinstance(features, Tensor) or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return suits(features) and all(plain(norm) and norm.training for norm in norms) and not heard(acts)


def conv_norm_relu(
    conv: nn.Conv2d,
    norm: nn.Module,
    features: Tensor,
    shortcut: Tensor | None = None,
    shortcut_conv: nn.Conv2d | None = None,
    shortcut_norm: nn.Module | None = None,
) -> Tensor:
    """relu(norm(conv(features)) + shortcut), the shortcut by a convolution and a norm of its own where it has them."""
    raw, numbers = bare(conv, norm, features)
    other = None
    if shortcut is not None and shortcut_conv is not None and shortcut_norm is not None:
        shortcut, other = bare(shortcut_conv, shortcut_norm, shortcut)
    fused = raw.is_cuda and kernels.fits(raw) and (shortcut is None or kernels.fits(shortcut))
    return (kernels.norm_relu if fused else kernels.norm_relu_twin)(raw, numbers, shortcut, other)


def conv_norm_relu_pool(
    conv: nn.Conv2d, norm: nn.Module | None, features: Tensor, pixels: PixelNorm | None = None
) -> Tensor:
    """The end of a stem: the same, max-pooled by 3x3 with stride 2, its pixels normalised where that is asked for."""
    raw, numbers = bare(conv, norm, features)
    fused = raw.is_cuda and kernels.fits(raw) and raw.shape[1] <= pooling.WIDEST
    return (pooling.pool_relu if fused else pooling.pool_relu_twin)(raw, numbers, pixels)


def conv_relu_pool(conv: nn.Conv2d, images: Tensor, pixels: PixelNorm) -> Tensor:
    """A stem without norm that learns: pooling, bias, ReLU and the pixels' norm in one pass, and one back."""
    raw = conv._conv_forward(images, conv.weight, None)
    fused = raw.is_cuda and kernels.fits(raw) and raw.shape[1] <= pooling.WIDEST
    return (pooling.pool if fused else pooling.pool_twin)(raw, conv.bias, True, pixels)


def pool_features(pool: nn.Module, features: Tensor) -> Tensor:
    """ResNet's max pooling, where it learns; another pooling, or one that somebody listens to, as it is."""
    usual = is_usual_pool(pool) and features.is_cuda and suits(features) and kernels.fits(features)
    return pooling.pool(features) if usual and features.shape[1] <= pooling.WIDEST else pool(features)


def conv_act_norm(conv: nn.Conv2d, features: Tensor, act: str = "", norm: nn.Module | None = None) -> Tensor:
    """norm(act(conv(features))), act one of "", "gelu" and "silu"; to be asked for where `fits_inference` says so."""
    raw = conv._conv_forward(features, conv.weight, None)
    numbers = None if norm is None or isinstance(norm, nn.Identity) else fixed(norm)
    run = epilogues.epilogue if raw.is_cuda and kernels.fits(raw) else epilogues.epilogue_twin
    return run(raw, conv.bias, act, numbers)


def fixed(norm: nn.Module) -> kernels.Norm:
    """What a norm with fixed statistics does, as numbers."""
    if isinstance(norm, ChannelAffine):
        return kernels.Norm(norm.shift.flatten(), norm.gain.flatten())
    return kernels.Norm(norm.bias, norm.weight, norm.running_mean, norm.running_var, norm.eps)


def is_usual_pool(pool: nn.Module) -> bool:
    """Whether this is ResNet's max pooling, heard by nobody."""
    return type(pool) is nn.MaxPool2d and repr(pool) == repr(nn.MaxPool2d(3, 2, 1)) and not heard((pool,))


def bare(conv: nn.Conv2d, norm: nn.Module | None, features: Tensor) -> tuple[Tensor, kernels.Norm]:
    """The convolution without its bias, and what is to be done to it: the bias, or the norm."""
    if isinstance(norm, (nn.BatchNorm2d, ChannelAffine)):
        numbers = fixed(norm)
        if conv.bias is not None and numbers.mean is not None:
            numbers = numbers._replace(mean=numbers.mean - conv.bias)
        elif conv.bias is not None and numbers.weight is not None:
            numbers = numbers._replace(bias=numbers.bias + numbers.weight * conv.bias)
    else:
        numbers = kernels.Norm(conv.weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias)
    return conv._conv_forward(features, conv.weight, None), numbers
