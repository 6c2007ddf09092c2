"""BatchNorm over all processes. torch's own works on GPUs only; this adds CPUs, so that it can be tested anywhere."""

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn


class _Sum(torch.autograd.Function):
    """The sum over all processes; gradients are summed over them as well."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:  # type: ignore[override]
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _Sum.forward(ctx, gradient)


class SyncNorms(LayerSync):
    """Lightning's plugin: converts when the processes start."""

    def __init__(self, accelerator: str):
        self.on_cpu = accelerator == "cpu"

    def apply(self, model: nn.Module) -> nn.Module:
        return GlobalBatchNorm.convert(model) if self.on_cpu else convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        return model  # in evaluation a synchronised norm is an ordinary one


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Statistics of the batches of all processes together, gradients included."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Replace every BatchNorm below `module`, keeping its parameters and averages."""
        for name, child in module.named_children():
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                twin = cls(child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats)
                twin.weight, twin.bias = child.weight, child.bias
                for average in ("running_mean", "running_var", "num_batches_tracked"):
                    setattr(twin, average, getattr(child, average))
                setattr(module, name, twin.train(child.training))
            else:
                cls.convert(child)
        return module

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        others = [axis for axis in range(input.ndim) if axis != 1]
        values = input.double()
        count = values.new_tensor([input.numel() / input.shape[1]])
        sums = _Sum.apply(torch.cat([values.sum(others), values.square().sum(others), count]))
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        variance = square - mean.square()
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1  # type: ignore[operator]
                share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
                unbiased = variance * sums[-1] / (sums[-1] - 1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        shape = [1, -1] + [1] * (input.ndim - 2)
        normal = (values - mean.view(shape)) * (variance.view(shape) + self.eps).rsqrt()
        normal = normal.to(input.dtype)
        return normal if self.weight is None else torch.addcmul(self.bias.view(shape), normal, self.weight.view(shape))
