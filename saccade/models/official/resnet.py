"""Plain ResNets, timm's and torchvision's: the trunk of a VT-ResNet has their names.

Which of their tensors a VT-ResNet can take is its own affair: see `VT.adapt_checkpoint`.
"""

from collections.abc import Iterable

from torch import Tensor, nn


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the names of a ResNet with all four stages."""
    return {"bn1.weight", "layer1.0.conv1.weight", "layer4.0.conv1.weight"} <= set(keys)


def convert(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Their names are ours."""
    return dict(state_dict)
