"""The first convolution of a stem, 3x3 with stride 2, by its kernel where that suits: half precision on a GPU."""

import torch
from torch import Tensor, nn

from saccade.kernels import HALVES, allowed, suits
from saccade.kernels import first_conv as kernels
from saccade.layers.batch_norm import ChannelAffine, heard
from saccade.layers.residual import conv_act_norm, fits_inference, fixed
from saccade.ops._dispatch import compute_dtype


def starts(conv: nn.Module, images: Tensor) -> bool:
    """Whether the kernel takes this: a plain 3x3 convolution of three colours that nobody listens to.

    Pictures that get a gradient keep to the library, and so does float32.
    """
    if type(conv) is not nn.Conv2d or conv.in_channels != 3 or not isinstance(images, Tensor) or not suits(images):
        return False
    if not is_first(conv) or heard((conv,)) or images.requires_grad or not allowed("first_conv"):
        return False
    dtype = compute_dtype(images)
    return dtype in HALVES and (conv.weight.dtype == dtype or torch.is_autocast_enabled(images.device.type))


def is_first(conv: nn.Conv2d) -> bool:
    """Whether this is the first convolution of SViT's and PaCa's stems: 3x3, stride 2, to few channels."""
    layout = (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (2, 2), (1, 1), (1, 1))
    plain = conv.groups == 1 and conv.padding_mode == "zeros" and conv.bias is not None
    return layout and plain and conv.out_channels <= kernels.WIDEST


def first_conv(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """conv(images), images (B, 3, H, W) -> (B, N, H/2, W/2), by whatever suits."""
    if starts(conv, images):
        return kernels.first_conv(images, conv.weight, conv.bias, compute_dtype(images))
    return conv_act_norm(conv, images) if fits_inference(images, (conv,), ()) else conv(images)


def ends_fixed(norm: nn.Module) -> bool:
    """Whether a norm behind the first convolution only answers, and may be left to the kernel."""
    if torch.is_grad_enabled() or norm.training or heard((norm,)):
        return False
    if type(norm) is nn.BatchNorm2d:
        return norm.affine and norm.running_mean is not None
    return type(norm) in (ChannelAffine, nn.Identity)


def first_conv_gelu_norm(conv: nn.Conv2d, norm: nn.Module, images: Tensor) -> Tensor:
    """norm(gelu(conv(images))), to be asked for where `starts` and `ends_fixed` say so."""
    numbers = None if isinstance(norm, nn.Identity) else fixed(norm)
    return kernels.first_conv(images, conv.weight, conv.bias, compute_dtype(images), True, numbers)
