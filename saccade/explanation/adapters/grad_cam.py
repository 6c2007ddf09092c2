"""pytorch-grad-cam: the layers to explain, and how their outputs become feature maps.

    GradCAM(model, target_layers(model), reshape_transform=reshape_transform(model))

SViT and PaCa end with features, so Grad-CAM needs no transform. VT classifies tokens; the layer is the one that makes
the features they were read from. SparseFormer has no features after its stem: its tokens are put back onto a grid by
their regions, as for `features_only` (SparseFormer Appendix A.2).
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.explanation.hooks.record import grouping_modules, is_recomputation, trace_call
from saccade.models.paca import PaCa
from saccade.models.sparseformer import SparseFormer
from saccade.models.sparseformer_v2 import SparseFormerV2
from saccade.models.svit import SViT
from saccade.models.vt import VT
from saccade.tokens.locate import locate
from saccade.tokens.trace import RegionTrace

COARSENING = 4  # sampled features have stride 4 or less; the grid of tokens is this much coarser


def target_layers(model: nn.Module) -> list[nn.Module]:
    """The last layer with spatial features, or tokens with regions, whose output is one tensor."""
    if isinstance(model, (SViT, PaCa)):
        return [model.stages[-1]]
    if isinstance(model, VT):
        projectors = [getattr(block, "projector", None) for block in model.layer4.blocks] if model.layer4 else []
        layers = [projector for projector in projectors[:-1] if isinstance(projector, nn.Module)]
        return [layers[-1] if layers else model.layer3]
    if isinstance(model, SparseFormerV2):
        return [model.cortex.blocks[-1].get_submodule("norm1")]  # after it, only the class token is read
    if isinstance(model, SparseFormer) and model.axes == 2:
        return [model.cortex.blocks[-1].get_submodule("norm2")]
    raise TypeError(f"expected an image classifier of saccade, got {type(model).__name__}. Name the layers yourself.")


def reshape_transform(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """`reshape_transform` for the layers of `target_layers`; None where their outputs are features already."""
    target_layers(model)  # refuses other models
    return TokenGrid(model) if isinstance(model, SparseFormer) else None


class TokenGrid:
    """Put tokens (B, M, D), or their gradients, onto a grid (B, D, H, W) by the regions of the last forward pass.

    A forward hook on the last sampling module records the regions. It is removed with `remove`, or when the object is
    deleted.
    """

    def __init__(self, model: SparseFormer):
        self.num_prefix_tokens = model.num_prefix_tokens
        self.trace: RegionTrace | None = None
        reference = weakref.ref(self)  # the hook does not keep the object alive

        def hook(module: nn.Module, inputs: tuple, output: Any) -> None:
            grid = reference()
            if grid is not None and not is_recomputation():
                trace = trace_call(module, inputs, output)
                assert isinstance(trace, RegionTrace)
                grid.trace = trace._replace(tokens=None)

        self.remove = weakref.finalize(self, grouping_modules(model)[-1][1].register_forward_hook(hook).remove)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D), class token included -> (B, D, H, W)."""
        if self.trace is None:
            raise ValueError("expected a forward pass of the model before this call, got none. Run the model first.")
        height, width = (-(-side // COARSENING) for side in self.trace.size)
        return locate(tokens[:, self.num_prefix_tokens :], self.trace.regions.detach(), height, width)
