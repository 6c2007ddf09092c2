"""Dense convolutions with the norm, activation and sum that follow them."""

from collections.abc import Sequence

from torch import Tensor, nn

from saccade.ops.batch_norm import ACTIVATIONS


def conv_act_norm_reference(features: Tensor, conv: nn.Module, norm: nn.Module, act: str = "") -> Tensor:
    """norm(act(conv(features))), features (B, C, H, W)."""
    return norm(ACTIVATIONS[act](conv(features)))


conv_act_norm = conv_act_norm_reference


def conv_norm_act_reference(
    features: Tensor,
    conv: nn.Module,
    norm: nn.Module,
    act: str = "",
    shortcut: Tensor | None = None,
    shortcut_layers: Sequence[nn.Module] = (),
) -> Tensor:
    """act(norm(conv(features)) + shortcut), the shortcut through `shortcut_layers` (a convolution and a norm)."""
    features = norm(conv(features))
    for layer in shortcut_layers:
        shortcut = layer(shortcut)
    return ACTIVATIONS[act](features if shortcut is None else features + shortcut)


conv_norm_act = conv_norm_act_reference
