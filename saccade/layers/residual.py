"""What stands between convolutions, in as few passes as can be: bias, activation, norm, sum, pooling."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels import HALVES, allowed, blocks, cudnn, suits
from saccade.kernels import epilogue as epilogues
from saccade.kernels import norm_relu as kernels
from saccade.kernels import pool as pooling
from saccade.kernels.pool import PixelNorm
from saccade.layers.batch_norm import ChannelAffine, heard, plain
from saccade.layers.norm import adds_inside, bias_norm
from saccade.ops._dispatch import compute_dtype
from saccade.ops._weights import cached_layout, cast_weight

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
    for conv in convs:
        if type(conv) is not nn.Conv2d:
            return False
    for norm in norms:
        if type(norm) not in NORMS or norm.training:
            return False
    return not heard(convs) and not heard(norms)


def folds_inside(
    features: Tensor, convs: Sequence[nn.Module], norms: Sequence[nn.Module], shortcut: nn.Sequential | None = None
) -> bool:
    """The same under a compiler: whether it may fold the norms at every call, and leave the rest to cuDNN.

    That moves the weights once more, and saves a pass over every map.
    """
    if not isinstance(features, Tensor) or torch.is_grad_enabled() or not torch.compiler.is_compiling():
        return False
    if not allowed("conv_relu") or not suits(features) or compute_dtype(features) != features.dtype:
        return False
    convs, norms = (*convs, *(shortcut or ())[:1]), (*norms, *(shortcut or ())[1:])
    if any(type(conv) is not nn.Conv2d or not plain_conv(conv) for conv in convs) or heard(convs) or heard(norms):
        return False
    if any(type(norm) not in (nn.BatchNorm2d, nn.Identity) or norm.training for norm in norms):
        return False
    return all(cudnn.suits_shape(features, conv.weight) for conv in convs)


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
    if torch.compiler.is_compiling():
        return folded_conv_relu(conv, norm, features, shortcut, shortcut_conv, shortcut_norm)
    other = None
    if shortcut is not None and shortcut_conv is not None and shortcut_norm is not None:
        shortcut, other = bare(shortcut_conv, shortcut_norm, shortcut)
    folded = isinstance(norm, nn.Identity) and (other is None or isinstance(shortcut_norm, nn.Identity))
    if folded and conv.bias is not None and ends_inside(conv, features, shortcut):
        bias = conv.bias if other is None else conv.bias + other.bias
        return cudnn.conv_relu(features, conv.weight, bias, conv.stride, conv.padding, conv.dilation, shortcut)
    raw, numbers = bare(conv, norm, features)
    fused = raw.is_cuda and kernels.fits(raw) and (shortcut is None or kernels.fits(shortcut))
    return (kernels.norm_relu if fused else kernels.norm_relu_twin)(raw, numbers, shortcut, other)


def folded_conv_relu(
    conv: nn.Conv2d,
    norm: nn.Module,
    features: Tensor,
    shortcut: Tensor | None,
    shortcut_conv: nn.Conv2d | None,
    shortcut_norm: nn.Module | None,
) -> Tensor:
    """The same where `folds_inside` says so: norms folded into the weights on the way."""
    weight, bias = fold(conv, norm, features.dtype)
    if shortcut is not None and shortcut_conv is not None and shortcut_norm is not None:
        other, more = fold(shortcut_conv, shortcut_norm, features.dtype)
        layout = shortcut_conv.stride, shortcut_conv.padding, shortcut_conv.dilation
        shortcut, bias = F.conv2d(shortcut, other, None, *layout), bias + more
    return cudnn.conv_relu(features, weight, bias, conv.stride, conv.padding, conv.dilation, shortcut)


def fold(conv: nn.Conv2d, norm: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution with its norm, in the type of the map.

    torch.nn.utils.fuse_conv_bn_weights does the same, and makes new parameters of them at every call.
    """
    bias = conv.weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias
    if isinstance(norm, nn.Identity):
        return conv.weight.to(dtype), bias.to(dtype)
    gain = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return (conv.weight * gain.view(-1, 1, 1, 1)).to(dtype), (norm.bias + (bias - norm.running_mean) * gain).to(dtype)


def plain_conv(conv: nn.Conv2d) -> bool:
    """Whether a convolution has all channels in one group, and zeros around the map."""
    return conv.groups == 1 and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def ends_inside(conv: nn.Conv2d, features: Tensor, shortcut: Tensor | None) -> bool:
    """Whether bias, sum and ReLU can be left to cuDNN's convolution.

    Under autocast a float32 weight would be cast at every call: only a copy that is cast already takes this road.
    """
    return (
        plain_conv(conv)
        and compute_dtype(features) == features.dtype
        and cudnn.suits(features, conv.weight, conv.bias, shortcut)
    )


def conv_norm_relu_pool(
    conv: nn.Conv2d, norm: nn.Module | None, features: Tensor, pixels: PixelNorm | None = None
) -> Tensor:
    """The end of a stem: the same, max-pooled by 3x3 with stride 2, its pixels normalised where that is asked for."""
    raw, numbers = bare(conv, norm, features)
    return (pooling.pool_relu if pooling.fits(raw) else pooling.pool_relu_twin)(raw, numbers, pixels)


def convolve(conv: nn.Conv2d, features: Tensor) -> Tensor:
    """The convolution without its bias; the usual stem's over blocks of pixels, in half precision on a GPU."""
    if not over_blocks(conv, features):
        return conv._conv_forward(features, cast_weight(conv.weight), None)
    dtype, channels = compute_dtype(features), blocks.wide(conv.out_channels)
    if learns_over_pixels(conv):
        return blocks.stem_conv(features, conv.weight, dtype)
    changes = torch.is_grad_enabled() or torch.compiler.is_compiling()
    weigh = blocks.block_weight if changes else fixed_block_weight
    return F.conv2d(blocks.to_blocks(features, dtype, channels), weigh(conv.weight, dtype, channels))


def fixed_block_weight(weight: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """A stem's weight over blocks, without gradient; of a constant made once."""
    return cached_layout(weight, ("blocks", dtype, channels), lambda: blocks.block_weight(weight, dtype, channels))


def over_blocks(conv: nn.Conv2d, images: Tensor) -> bool:
    """Whether a stem's convolution runs over blocks of pixels: in half precision on a GPU, where compilers may."""
    if not is_usual_stem(conv) or not suits(images) or images.requires_grad:
        return False
    dtype = compute_dtype(images)
    if dtype not in HALVES or not allowed("stem_conv" if learns_over_pixels(conv) else "to_blocks"):
        return False
    return conv.weight.dtype == dtype or torch.is_autocast_enabled(images.device.type)


def learns_over_pixels(conv: nn.Conv2d) -> bool:
    """Whether a stem's weight learns whose gradient must not be made of blocks: those of twelve channels take the
    library ten times as long as they save.
    """
    return torch.is_grad_enabled() and conv.weight.requires_grad and blocks.wide(conv.out_channels) == 12


def stem_conv(conv: nn.Module, images: Tensor) -> Tensor:
    """A stem's convolution with its bias, over blocks of pixels where it can be; under compilers too."""
    if not stem_over_blocks(conv, images):
        return conv(images)
    raw = convolve(conv, images)
    return raw if conv.bias is None else raw + conv.bias.to(raw.dtype).view(-1, 1, 1)


def stem_conv_pool(conv: nn.Module, images: Tensor) -> Tensor:
    """The same, max-pooled by 3x3 with stride 2; a bias over blocks is added to what is left, with the same result."""
    if not stem_over_blocks(conv, images):
        return F.max_pool2d(conv(images), 3, stride=2, padding=1)
    raw = F.max_pool2d(convolve(conv, images), 3, stride=2, padding=1)
    return raw if conv.bias is None else raw + conv.bias.to(raw.dtype).view(-1, 1, 1)


def stem_over_blocks(conv: nn.Module, images: Tensor) -> bool:
    """Whether blocks are for this stem: a plain convolution that nobody listens to."""
    plain = type(conv) is nn.Conv2d and isinstance(images, Tensor) and suits(images) and not heard((conv,))
    return plain and over_blocks(conv, images)


def is_usual_stem(conv: nn.Conv2d) -> bool:
    """Whether this is ResNet's first convolution: 7x7, stride 2, of three colours."""
    usual = (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((7, 7), (2, 2), (3, 3), (1, 1))
    return usual and conv.in_channels == 3 and conv.groups == 1 and conv.padding_mode == "zeros"


def conv_relu_pool(conv: nn.Conv2d, images: Tensor, pixels: PixelNorm) -> Tensor:
    """A stem without norm that learns: pooling, bias, ReLU and the pixels' norm in one pass, and one back."""
    raw = convolve(conv, images)
    return (pooling.pool if pooling.fits(raw) else pooling.pool_twin)(raw, conv.bias, True, pixels)


def pool_features(pool: nn.Module, features: Tensor) -> Tensor:
    """ResNet's max pooling, where it learns; another pooling, or one that somebody listens to, as it is."""
    usual = is_usual_pool(pool) and suits(features) and pooling.fits(features)
    return pooling.pool(features) if usual else pool(features)


def learns_compiled(features: Tensor) -> bool:
    """Whether a compiler is to make a stem that learns, and may take the pooling's kernels for it."""
    if not isinstance(features, Tensor) or not torch.is_grad_enabled() or not torch.compiler.is_compiling():
        return False
    return allowed("pool") and suits(features)


def conv_act_norm(conv: nn.Conv2d, features: Tensor, act: str = "", norm: nn.Module | None = None) -> Tensor:
    """norm(act(conv(features))), act one of "", "gelu" and "silu"; to be asked for where `fits_inference` says so."""
    raw = conv._conv_forward(features, conv.weight, None)
    numbers = None if norm is None or isinstance(norm, nn.Identity) else fixed(norm)
    run = epilogues.epilogue if raw.is_cuda and kernels.fits(raw) else epilogues.epilogue_twin
    return run(raw, conv.bias, act, numbers)


def conv_norm(conv: nn.Conv2d, norm: nn.Module, features: Tensor) -> Tensor:
    """norm(conv(features)), the norm one over channels. On a GPU it takes the bias along where nothing learns."""
    bias = conv.bias
    if bias is None or not adds_bias_late(conv, features):
        return norm(conv(features))
    raw = conv._conv_forward(features, conv.weight, None).permute(0, 2, 3, 1)
    if adds_inside(raw, norm):
        return bias_norm(raw, bias, norm).permute(0, 3, 1, 2)
    return norm((raw + bias.to(raw.dtype)).permute(0, 3, 1, 2))


def adds_bias_late(conv: nn.Module, features: Tensor) -> bool:
    """Whether a bias is to be added to (B, H, W, C): in inference on a GPU, and by compilers, which would add it to a
    map in another order of memory.
    """
    if not isinstance(features, Tensor) or type(conv) is not nn.Conv2d or heard((conv,)):
        return False
    return suits(features) and (torch.compiler.is_compiling() or not torch.is_grad_enabled())


def fixed(norm: nn.Module) -> kernels.Norm:
    """What a norm with fixed statistics does, as numbers."""
    if isinstance(norm, ChannelAffine):
        return kernels.Norm(norm.shift.flatten(), norm.gain.flatten())
    return kernels.Norm(norm.bias, norm.weight, norm.running_mean, norm.running_var, norm.eps)


def is_usual_pool(pool: nn.Module) -> bool:
    """Whether this is ResNet's max pooling, heard by nobody."""
    if type(pool) is not nn.MaxPool2d or pool.ceil_mode or pool.return_indices or heard((pool,)):
        return False
    return (pool.kernel_size, pool.stride, pool.padding, pool.dilation) == (3, 2, 1, 1)


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
    return convolve(conv, features), numbers
