"""Methods that a task model forwards to its backbone: what optimizers, checkpointing and loss scalers call."""

from typing import Any

from timm.models._features import FeatureGetterNet
from torch import Tensor, nn


class BackboneMethods(nn.Module):
    """Base class of segmenters and detectors. `backbone_path` names the submodule that holds the backbone."""

    backbone_path = "backbone"

    @property
    def backbone_model(self) -> Any:
        """The backbone without timm's `FeatureGetterNet`. Any model of saccade or timm, hence untyped."""
        module = self.get_submodule(self.backbone_path)
        return module.model if isinstance(module, FeatureGetterNet) else module

    @property
    def backbone_prefix(self) -> str:
        """Prefix of the backbone's keys in the state dict."""
        wrapped = isinstance(self.get_submodule(self.backbone_path), FeatureGetterNet)
        return f"{self.backbone_path}.model." if wrapped else f"{self.backbone_path}."

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that the backbone exempts from weight decay."""
        return {self.backbone_prefix + name for name in getattr(self.backbone_model, "no_weight_decay", set)()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone_model.set_grad_checkpointing(enable)

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Scale SparseFormer's bound on the gradient of sampling points with the loss; other backbones have none."""
        set_loss_scale = getattr(self.backbone_model, "set_loss_scale", None)
        if set_loss_scale is not None:
            set_loss_scale(scale)
