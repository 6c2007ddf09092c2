"""Plain ResNets of timm and torchvision: the first stages of a VT-ResNet have their names.

`VT.adapt_checkpoint` selects the tensors that a VT-ResNet can load.
"""

from collections.abc import Iterable

from torch import Tensor, nn


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the keys of a ResNet with all four stages."""
    return {"bn1.weight", "layer1.0.conv1.weight", "layer4.0.conv1.weight"} <= set(keys)


def convert(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a copy: the names are the same."""
    return dict(state_dict)
