"""VideoSparseFormer: SparseFormer with a time axis (arXiv 2304.03768, Sec. 3.3).

group     tokens.regions.RegionTokenizer      Eqs. 2-9 with a third axis
relate    layers.attention.SelfAttention      Sec. 3.2
put back  tokens.trace.TubeTrace              for figures; classification needs no features

A token's region becomes a tube: centre, size, moment and length. Tokens adjust all six numbers, place points in space
and time, and interpolate between pixels and between frames. The early convolution sees the frames one by one. The
tokens of the image model are repeated for each of `inflation` equal segments of the clip, so that the weights of an
image model, inflated, give its logits on a clip of one repeated frame.
"""

from typing import Any

import torch
import torch.fx
from timm.layers import trunc_normal_
from timm.models import generate_default_cfgs
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from saccade.layers.grid import channels_last, check_clips
from saccade.models.registry import build, pretrained_cfg, register
from saccade.models.sparseformer import SparseFormer
from saccade.tokens.regions import region_tubes

__all__ = ["VideoSparseFormer"]
torch.fx.wrap("check_clips")  # unlike timm's list of leaves, this holds in every file a traced model reaches into
torch.fx.wrap("channels_last")


class VideoSparseFormer(SparseFormer):
    """Latent tokens that sample a clip in tubes they move themselves; timm's interface.

    Args:
        inflation: segments of time, each with its own `num_tokens` tokens. Clips may have any number of frames.
        time_spread: whether inflated weights spread the points of a token in time, a third of its segment before and
            after its middle. Without, all start in the middle, where the deviation that divides offsets is zero, and
            gradients are 200 times those of a randomly initialised model. The logits of a clip of one repeated frame
            stay those of the image model if the clip has at least 3 frames per segment.
        restrict_gradient: as in `SparseFormer`, but off, as in the authors' video model.
        kwargs: the other options of `SparseFormer`, except `dense`.
    """

    axes = 3  # across, down, time
    output_formats = ("NLC",)

    def __init__(self, inflation: int = 8, restrict_gradient: bool = False, time_spread: bool = False, **kwargs: Any):
        if inflation < 1:
            raise ValueError(f"expected inflation >= 1 (segments of time), got {inflation}.")
        super().__init__(restrict_gradient=restrict_gradient, **kwargs)
        if self.locate is not None:
            raise ValueError("dense=True is for images; `saccade.record` has the maps of every token of a clip.")
        self.inflation = inflation
        self.time_spread = time_spread
        self.feature_info = []
        tubes = region_tubes(self.regions.detach(), inflation)
        self.regions = nn.Parameter(tubes) if isinstance(self.regions, nn.Parameter) else tubes
        self.embeddings = nn.Parameter(self.embeddings.new_empty(len(tubes), self.embeddings.shape[1]))
        trunc_normal_(self.embeddings, std=1.0)

    def adapt_checkpoint(
        self, state_dict: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
        """Inflate an image model's weights: tokens for every segment of time, zeros for the time axis."""
        if state_dict.get("regions", self.regions).shape[1] == 2 * self.axes:
            return *super().adapt_checkpoint(state_dict), {}
        inflated, changed = inflate(state_dict, self.inflation, self.time_spread)
        new = {}
        for key in ("head.fc.weight", "head.fc.bias"):
            theirs, ours = inflated.get(key), self.state_dict().get(key)
            if theirs is not None and ours is not None and len(theirs) != len(ours):
                new[key] = f"{len(ours)} classes, the image model has {len(theirs)}"
        adapted, no_place = super().adapt_checkpoint({k: v for k, v in inflated.items() if k not in new})
        return adapted, new | no_place, {key: how for key, how in changed.items() if key in adapted}

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the cortex blocks after the last chosen pass, and the head."""
        take, last = feature_take_indices(self.focus.repeats + len(self.cortex.blocks), indices)
        self.cortex.blocks = self.cortex.blocks[: max(0, last + 1 - self.focus.repeats)]
        super().prune_intermediate_layers(1, prune_norm, prune_head)
        return take

    def extract_features(self, images: Tensor) -> Tensor:
        """Clips (B, 3, T, H, W) -> the features that are sampled (B, C, T, h, w)."""
        check_clips(images, self.in_chans)
        frames = images.permute(0, 2, 3, 4, 1).flatten(0, 1).permute(0, 3, 1, 2)  # (B T, 3, H, W)
        return self.stem(channels_last(frames)).unflatten(0, (images.shape[0], -1)).transpose(1, 2)

    def forward(self, clips: Tensor) -> Tensor:
        """clips (B, 3, T, H, W) -> logits (B, K)."""
        return self.forward_head(self.forward_features(clips))


def inflate(
    state_dict: dict[str, Tensor], segments: int, spread: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of an image model for a video model, and how the changed ones changed.

    Offsets are x y per point and become x y t; deltas are shifts, then growths, and each gets a third. `spread` places
    every second point a third of the segment before its middle, the others after: a deviation of 1/3, as
    `place_points` normalises it, with the smallest extent.
    """
    inflated, changed = dict(state_dict), {}
    for key, value in state_dict.items():
        if key in ("embeddings", "regions"):
            inflated[key] = value.repeat(segments, 1) if key == "embeddings" else region_tubes(value, segments)
            changed[key] = f"repeated for {segments} segments of time"
        elif key.endswith((".placer.to_offset.weight", ".placer.grid", ".adjuster.to_delta.weight")):
            pairs = value.unflatten(0, (-1, 2))  # rows x y x y …
            time = torch.zeros_like(pairs[:, :1])
            changed[key] = "zeros along time"
            if spread and key.endswith(".grid"):
                time[0::2], time[1::2] = -1 / 3, 1 / 3
                changed[key] = "spread along time"
            inflated[key] = torch.cat([pairs, time], dim=1).flatten(0, 1)
    return inflated, changed


def _clip(size: int, frames: int, **changes: Any) -> dict[str, Any]:
    return pretrained_cfg(size, input_size=(3, frames, size, size), first_conv="stem.conv", **changes)


default_cfgs = generate_default_cfgs(
    {
        **{f"video_sparseformer_{size}.k400": _clip(224, 32, num_classes=400) for size in ("tiny", "small", "base")},
        "video_sparseformer_nano.untrained": _clip(64, 8, num_classes=8),
    }
)


def _video(name: str, pretrained: bool, **kwargs: Any) -> VideoSparseFormer:
    if kwargs.get("features_only"):
        raise ValueError(f"{name} has no feature maps; use forward_intermediates(clips) for the tokens of every pass.")
    return build(VideoSparseFormer, name, pretrained, **kwargs)


@register
def video_sparseformer_tiny(pretrained: bool = False, **kwargs: Any) -> VideoSparseFormer:
    """VideoSparseFormer-T. Reported: 31M parameters, 22 GFLOPs per view of 32 frames, 77.9 top-1 on Kinetics-400."""
    size = dict(num_classes=400, num_tokens=49, focus_dim=256, cortex_dim=512, depth=8)
    return _video("video_sparseformer_tiny", pretrained, **(size | kwargs))


@register
def video_sparseformer_small(pretrained: bool = False, **kwargs: Any) -> VideoSparseFormer:
    """VideoSparseFormer-S. Reported: 48M parameters, 38 GFLOPs per view of 32 frames, 79.1 top-1 on Kinetics-400."""
    size = dict(num_classes=400, num_tokens=64, focus_dim=320, cortex_dim=640, depth=8)
    return _video("video_sparseformer_small", pretrained, **(size | kwargs))


@register
def video_sparseformer_base(pretrained: bool = False, **kwargs: Any) -> VideoSparseFormer:
    """VideoSparseFormer-B. Reported: 81M parameters, 74 GFLOPs per view of 32 frames, 79.8 top-1 on Kinetics-400."""
    size = dict(num_classes=400, num_tokens=81, focus_dim=384, cortex_dim=768, depth=10)
    return _video("video_sparseformer_base", pretrained, **(size | kwargs))


@register
def video_sparseformer_nano(pretrained: bool = False, **kwargs: Any) -> VideoSparseFormer:
    """VideoSparseFormer for short clips of 64 px and CPUs; not in the paper. 4 times 16 tokens, 16 samples each."""
    size = dict(num_classes=8, inflation=4, num_tokens=16, focus_dim=128, cortex_dim=192, depth=6, heads=8, points=16)
    return _video("video_sparseformer_nano", pretrained, **(size | dict(channels=48) | kwargs))
