"""Batch norm synchronised over processes. torch.nn.SyncBatchNorm supports GPUs only; this adds CPUs, for tests."""

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn


class _AllReduceSum(torch.autograd.Function):
    """Sum over all processes, of values in forward and of gradients in backward."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:  # type: ignore[override]
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _AllReduceSum.forward(ctx, gradient)


class BatchNormSync(LayerSync):
    """Lightning plugin that converts batch norms when the processes start."""

    def __init__(self, accelerator: str):
        self.on_cpu = accelerator == "cpu"

    def apply(self, model: nn.Module) -> nn.Module:
        return CpuSyncBatchNorm.convert(model) if self.on_cpu else convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        return model  # in evaluation mode a synchronised norm equals an ordinary one


class CpuSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm with statistics, and their gradients, over the batches of all processes."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Replace every batch norm below `module`, sharing its parameters and running statistics."""
        for name, child in module.named_children():
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                norm = cls(child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats)
                norm.weight, norm.bias = child.weight, child.bias
                for buffer in ("running_mean", "running_var", "num_batches_tracked"):
                    setattr(norm, buffer, getattr(child, buffer))
                setattr(module, name, norm.train(child.training))
            else:
                cls.convert(child)
        return module

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        values = input.double()
        count = values.new_tensor([input.numel() / input.shape[1]])
        sums: Tensor = _AllReduceSum.apply(torch.cat([values.sum(axes), values.square().sum(axes), count]))  # type: ignore[assignment]
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        variance = square - mean.square()
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1  # type: ignore[operator]
                momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
                unbiased = variance * sums[-1] / (sums[-1] - 1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        shape = [1, -1] + [1] * (input.ndim - 2)
        normal = (values - mean.view(shape)) * (variance.view(shape) + self.eps).rsqrt()
        normal = normal.to(input.dtype)
        return normal if self.weight is None else torch.addcmul(self.bias.view(shape), normal, self.weight.view(shape))
