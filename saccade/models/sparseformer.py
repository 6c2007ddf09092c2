"""SparseFormer: sparse visual recognition via limited latent tokens, arXiv 2304.03768.

group     tokens.regions.RegionTokenizer
relate    layers.attention.SelfAttention
put back  tokens.locate.locate, or tokens.locate.LocationAttention for `features_only`; classification needs neither

Tokens are called latent tokens in the paper, and their regions RoIs. A small "focusing" transformer looks at the image
several times with the same weights, a large "cortex" transformer looks once more and thinks. Where the paper is silent,
the authors' library decides (their weights give their outputs here): 64 heads; LayerNorm after the mean over tokens;
no factor 0.5 on the offsets; the map normalised over channels without scale and shift. Their training code differs in
four small constants (`training_code=True`). With fewer than 32 points their library mixes to 32; here, as in the
paper and in the cost of its Table 3c, to as many as were sampled.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates, drop_path, trunc_normal_
from timm.models import checkpoint, generate_default_cfgs, register_notrace_function, register_notrace_module
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from saccade.layers.attention import SelfAttention
from saccade.layers.batch_norm import heard
from saccade.layers.grid import channels_last, check_images
from saccade.layers.mlp import TokenMlp
from saccade.layers.norm import TokenNorm
from saccade.layers.residual import (
    PixelNorm,
    conv_norm_relu_pool,
    conv_relu_pool,
    fits_inference,
    fits_training,
    learns_compiled,
    stem_conv_pool,
)
from saccade.models.registry import build, choose, pretrained_cfg, register
from saccade.tokens.locate import LocationAttention, locate
from saccade.tokens.regions import (
    AdaptiveDecoder,
    FixedPoints,
    LinearDecoder,
    PointPlacer,
    RegionAdjuster,
    RegionTokenizer,
    StaticDecoder,
    region_grid,
)

__all__ = ["SparseFormer"]
PYRAMID = (4, 8, 16, 32)  # strides of the dense maps


@register_notrace_function
def at_least_float32(values: Tensor) -> Tensor:
    """Coordinates are computed in float32, whatever the type of the model; in float64 where it is that."""
    return values if values.dtype == torch.float64 else values.float()


@register_notrace_module
class MapNorm(nn.Module):
    """Normalise every pixel over its channels, without scale and shift (SF-32), in the type of the map."""

    def __init__(self, eps: float = 1e-5, unbiased: bool = False):
        super().__init__()
        self.eps = eps
        self.unbiased = unbiased

    def share(self, channels: int) -> float:
        """The variance divided by n, over that divided by n - 1."""
        return (channels - 1) / channels if self.unbiased else 1.0

    @torch.jit.ignore
    def numbers(self, channels: int) -> PixelNorm:
        share = self.share(channels)
        return PixelNorm(self.eps * share, share**0.5)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W); channels-last in memory, so the permutes are views."""
        pixels, channels = features.permute(0, 2, 3, 1), features.shape[1]
        share = self.share(channels)
        low = features.dtype == torch.bfloat16 or features.dtype == torch.float16
        if low and not torch.jit.is_scripting():
            with torch.autocast(features.device.type, enabled=False):  # which would hand on a float32 copy
                pixels = F.layer_norm(pixels, (channels,), eps=self.eps * share)
        else:
            pixels = F.layer_norm(pixels, (channels,), eps=self.eps * share)
        if self.unbiased:
            pixels = pixels * share**0.5
        return pixels.permute(0, 3, 1, 2)


class EarlyConv(nn.Module):
    """The lightest start of a ResNet: 7x7 convolution of stride 2, 3x3 max pooling of stride 2, ReLU (SF-31).

    Pooling before ReLU is the same function and a quarter of the work.
    """

    def __init__(self, in_chans: int, dim: int, norm: nn.Module):
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, 7, stride=2, padding=3)
        self.norm = norm

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/4, W/4)."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if type(self.norm) is MapNorm and not heard((self.conv, self.norm)):
                pixels = self.norm.numbers(self.conv.out_channels)
                if fits_inference(images, (self.conv,), ()):
                    return conv_norm_relu_pool(self.conv, None, images, pixels)
                if fits_training(images, (), ()) or learns_compiled(images):
                    return conv_relu_pool(self.conv, images, pixels)
        if torch.jit.is_scripting():
            features = F.max_pool2d(self.conv(images), 3, stride=2, padding=1)
        else:
            features = stem_conv_pool(self.conv, images)
        return self.norm(F.relu(features))


class PatchConv(nn.Module):
    """The start of a ViT/8 that keeps the grid: 8x8 patches, zeros where the last one is cut (SF-33)."""

    def __init__(self, in_chans: int, dim: int, norm: nn.Module):
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, 8, stride=8)
        self.norm = norm

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/8, W/8)."""
        return self.norm(self.conv(F.pad(images, (0, -images.shape[3] % 8, 0, -images.shape[2] % 8))))


class SparseFormerBlock(nn.Module):
    """Tokens relate, look (in the sampling blocks), and think; each in front of its norm, each added (SF-22, SF-23)."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, look: nn.Module | None = None):
        super().__init__()
        self.norm1 = TokenNorm(dim)
        self.attn = SelfAttention(dim, num_heads)
        self.look = look
        self.norm2 = TokenNorm(dim)
        self.mlp = TokenMlp(dim, int(dim * mlp_ratio))

    def forward(self, tokens: Tensor, regions: Tensor, features: Tensor, drop: float) -> tuple[Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W), rate of drop path -> tokens, regions."""
        tokens = tokens + drop_path(self.attn(self.norm1(tokens)), drop, self.training)  # relate
        if self.look is not None:
            tokens, regions, _ = self.look(tokens, regions, features, drop)  # group
        return tokens + drop_path(self.mlp(self.norm2(tokens)), drop, self.training), regions


@register_notrace_module
class TokenTransformer(nn.Module):
    """A row of blocks, the whole row run `repeats` times with the same weights; every pass has its drop path rate."""

    def __init__(self, blocks: Sequence[nn.Module], rates: Sequence[float], repeats: int = 1):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.rates = list(rates)
        self.repeats = repeats
        self.grad_checkpointing = False

    def forward(
        self, tokens: Tensor, regions: Tensor, features: Tensor, passes: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W) -> tokens, regions.

        `passes` collects the tokens behind every block.
        """
        step = 0
        for _ in range(self.repeats):
            for block in self.blocks:
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    tokens, regions = checkpoint(block, tokens, regions, features, self.rates[step])
                else:
                    tokens, regions = block(tokens, regions, features, self.rates[step])
                if passes is not None:
                    passes.append(tokens)
                step += 1
        return tokens, regions


class TokenHead(nn.Module):
    """Mean over tokens, norm, linear classifier (SF-29); without pooling, the classifier's word on every token."""

    def __init__(self, dim: int, num_classes: int, global_pool: str = "avg", drop: float = 0.0):
        super().__init__()
        choose("global_pool", global_pool, ("avg", ""))
        self.dim = dim
        self.global_pool = global_pool
        self.norm = TokenNorm(dim)
        self.drop = nn.Dropout(drop)
        self.fc = nn.Linear(dim, num_classes) if num_classes > 0 else nn.Identity()

    def reset(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            choose("global_pool", global_pool, ("avg", ""))
            self.global_pool = global_pool
        self.fc = nn.Linear(self.dim, num_classes) if num_classes > 0 else nn.Identity()
        init_weights(self.fc)

    def forward(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """tokens (B, M, D) -> logits (B, K), or (B, M, K) without pooling."""
        pooled = tokens.mean(1) if self.global_pool == "avg" else tokens
        pooled = self.drop(self.norm(pooled))
        return pooled if pre_logits else self.fc(pooled)


class SparseFormer(nn.Module):
    """Tokens that look at the image where they choose, in timm's contract.

    Args:
        num_tokens: N, any number; a square one starts on a grid. Cost grows with it, not with the image.
        focus_dim, cortex_dim: widths of the focusing and of the cortex transformer.
        repeats: passes of the focusing transformer; 0 is "nil" of Table 3b: no passes, regions and points fixed.
        depth: blocks of the cortex transformer; the first one looks, too.
        heads: attention heads, at both widths.
        points: samples a token takes at each look.
        channels: width of the map that is sampled (that of the image for "rgb").
        image_features: "early_conv" (stride 4), "vit8" (8x8 patches) or "rgb" (the image itself) (Table 3d).
        decoding: "adaptive", "static" or "linear" (Table 3e).
        region_init: "half", "cell" or "whole" sides of the first regions (Table 9).
        restrict_gradient: clamp the gradient of sampling points, see `RegionTokenizer` and `set_loss_scale`.
        point_scale: 0.5 follows Eq. 3 to the letter, see `PointPlacer`.
        training_code: the small constants of the authors' training code; same weights, logits 1 % different.
        dense: with the projections that a content-aware dense map needs; `features_only=True` implies it.
    """

    axes = 2  # of what tokens look at: across and down; a video adds time
    precise = ("regions",)  # coordinates stay float32 when a copy is cast

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        num_tokens: int = 49,
        focus_dim: int = 256,
        cortex_dim: int = 512,
        repeats: int = 4,
        depth: int = 8,
        heads: int = 64,
        points: int = 36,
        channels: int = 96,
        mlp_ratio: float = 4.0,
        image_features: str = "early_conv",
        decoding: str = "adaptive",
        region_init: str = "half",
        restrict_gradient: bool = True,
        point_scale: float = 1.0,
        training_code: bool = False,
        dense: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        choose("image_features", image_features, ("early_conv", "vit8", "rgb"))
        choose("decoding", decoding, ("adaptive", "static", "linear"))
        choose("region_init", region_init, ("half", "cell", "whole"))
        if num_tokens < 1 or depth < 1 or repeats < 0:
            raise ValueError(
                f"expected num_tokens >= 1, depth >= 1 and repeats >= 0; got {num_tokens}, {depth}, {repeats}."
            )
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = cortex_dim
        last = f"cortex.blocks.{depth - 1}"
        self.feature_info = [{"num_chs": cortex_dim, "reduction": stride, "module": last} for stride in PYRAMID]
        self.stem_dim = channels = in_chans if image_features == "rgb" else channels
        norm = MapNorm(1e-7, unbiased=True) if training_code else MapNorm()
        if image_features == "rgb":
            self.stem = nn.Identity()
        else:
            self.stem = (EarlyConv if image_features == "early_conv" else PatchConv)(in_chans, channels, norm)
        self.embeddings = nn.Parameter(torch.empty(num_tokens, focus_dim))
        regions = region_grid(num_tokens, region_init)
        if repeats:
            self.regions = nn.Parameter(regions)
        else:
            self.register_buffer("regions", regions)

        def look(dim: int) -> RegionTokenizer:
            eps = 1e-7 if training_code else 1e-5
            if repeats:
                adjuster = RegionAdjuster(dim, self.axes)
                placer = PointPlacer(dim, points, self.axes, point_scale, eps)
            else:
                adjuster, placer = None, FixedPoints(points, self.axes, point_scale, eps)
            if decoding == "adaptive":
                decoder = AdaptiveDecoder(dim, channels, points, eps=1e-6 if training_code else 1e-5)
            else:
                decoder = {"static": StaticDecoder, "linear": LinearDecoder}[decoding](dim, channels, points)
            return RegionTokenizer(adjuster, placer, decoder, restrict_gradient and repeats > 0)

        rates = calculate_drop_path_rates(drop_path_rate, repeats + depth)  # passes count, not blocks (SF-51)
        focus = [SparseFormerBlock(focus_dim, heads, mlp_ratio, look(focus_dim))] if repeats else []
        self.focus = TokenTransformer(focus, rates[:repeats], repeats)
        self.bridge = nn.Sequential(nn.Linear(focus_dim, cortex_dim), TokenNorm(cortex_dim))
        cortex = [
            SparseFormerBlock(cortex_dim, heads, mlp_ratio, None if i else look(cortex_dim)) for i in range(depth)
        ]
        self.cortex = TokenTransformer(cortex, rates[repeats:])
        self.locate = LocationAttention(channels, cortex_dim) if dense else None
        self.head = TokenHead(cortex_dim, num_classes, global_pool, drop_rate)
        self.apply(init_weights)
        trunc_normal_(self.embeddings, std=1.0)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters(recurse=False) if name == "regions"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        cortex = r"^cortex" if coarse else r"^cortex\.blocks\.(\d+)"
        blocks = [(r"^focus|^bridge", (-1,)), (cortex, (0,) if coarse else None), (r"^locate", (99999,))]
        return {"stem": r"^stem|^embeddings|^regions", "blocks": blocks}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.focus.grad_checkpointing = enable
        self.cortex.grad_checkpointing = enable

    @torch.jit.ignore
    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Tell the restriction of gradients the factor on the loss: `scaler.get_scale()`, before every backward.

        Only float16 training scales its loss; the bound on the gradient of sampling points scales with it.
        """
        for module in self.modules():
            if isinstance(module, RegionTokenizer):
                module.loss_scale.fill_(scale)

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)

    @torch.jit.ignore
    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Another number of tokens starts with new embeddings and regions, all else is kept (SF-53)."""
        new: dict[str, str] = {}
        theirs = len(state_dict["embeddings"]) if "embeddings" in state_dict else len(self.embeddings)
        if theirs != len(self.embeddings):
            new = dict.fromkeys(
                ("embeddings", "regions"), f"{len(self.embeddings)} tokens, the checkpoint has {theirs}"
            )
        if self.locate is not None and not any(key.startswith("locate.") for key in state_dict):
            dense = (name for name in self.state_dict() if name.startswith("locate."))
            new |= dict.fromkeys(dense, "a classifier has no dense map; train it with the dense task")
        return {key: value for key, value in state_dict.items() if key not in new}, new

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Images (B, 3, H, W) -> what the tokens say of it, in one of two forms, and the last tokens (B, M, D).

        "NLC" has the tokens (B, M, D) after every pass, `repeats` of the focusing, `depth` of the cortex transformer.
        "NCHW" has the last tokens put back on the grid at strides 4, 8, 16 and 32 (SF-71, SF-72): blended by location
        (see `tokens.locate`) at stride 4, and averaged. `norm` has nothing to do, as the norm stands behind the mean
        over tokens; nor has `stop_early`, as every map comes from the last tokens.
        """
        choose("output_fmt", output_fmt, ("NCHW", "NLC"))
        passes: list[Tensor] = []
        tokens, regions, features = self.forward_tokens(x, passes)
        found = passes if output_fmt == "NLC" else self.pyramid(x, tokens, regions, features)
        take, _ = feature_take_indices(len(found), indices)
        intermediates = [found[i] for i in take]
        return intermediates if intermediates_only else (tokens, intermediates)

    def pyramid(self, images: Tensor, tokens: Tensor, regions: Tensor, features: Tensor) -> list[Tensor]:
        """Tokens (B, M, D) back on the grid: maps (B, D, H/4, W/4), (B, D, H/8, W/8), … to stride 32."""
        height, width = -(-images.shape[2] // PYRAMID[0]), -(-images.shape[3] // PYRAMID[0])
        if self.locate is None:
            maps = [locate(tokens, regions, height, width)]
        else:
            if features.shape[2] != height or features.shape[3] != width:
                features = F.interpolate(features, (height, width), mode="bilinear", align_corners=False)
            maps = [self.locate(features, tokens, regions)]
        for _ in PYRAMID[1:]:
            maps.append(F.avg_pool2d(maps[-1], 2, ceil_mode=True))
        return maps

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the head; the rest of the network stands behind every map."""
        take, _ = feature_take_indices(len(PYRAMID), indices)
        if prune_norm or prune_head:
            self.head.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_tokens(
        self, images: Tensor, passes: list[Tensor] | None = None, extent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """images (B, 3, H, W) -> tokens (B, M, D), their regions (B, M, 4), and the map they looked at (B, C, h, w).

        `passes` collects the tokens after every pass. `extent` (B, 2) says which share of the width and height each
        image fills in a batch of mixed sizes: tokens start inside it, and all they do is relative to where they are.
        """
        check_images(images, self.in_chans)
        return self.look_at(self.stem(channels_last(images)), passes, extent)

    def look_at(
        self, features: Tensor, passes: list[Tensor] | None = None, extent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), regions (B, M, 4), features."""
        batch = features.shape[0]  # copies below: torch's flop counter stumbles over views of parameters
        tokens = self.embeddings.to(features.dtype).repeat(batch, 1, 1)
        regions = at_least_float32(self.regions).repeat(batch, 1, 1)
        if extent is not None:
            regions = regions * extent.to(regions.dtype).repeat(1, 2).unsqueeze(1)
        tokens, regions = self.focus(tokens, regions, features, passes)
        tokens, regions = self.cortex(self.bridge(tokens), regions, features, passes)
        return tokens, regions, features

    def forward_features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> tokens (B, M, D)."""
        return self.forward_tokens(images)[0]

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(tokens, pre_logits=pre_logits)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> logits (B, K)."""
        return self.forward_head(self.forward_features(images))


def init_weights(module: nn.Module) -> None:
    """Linear layers truncated normal, convolutions Kaiming, looking modules as appendix A.3 (SF-42 … SF-48)."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(module.bias)
    elif isinstance(module, RegionAdjuster | PointPlacer | AdaptiveDecoder | StaticDecoder | LocationAttention):
        module.init_weights()


default_cfgs = generate_default_cfgs(
    {
        "sparseformer_tiny.in1k": pretrained_cfg(first_conv="stem.conv"),
        "sparseformer_small.in1k": pretrained_cfg(first_conv="stem.conv"),
        "sparseformer_base.in1k": pretrained_cfg(first_conv="stem.conv"),
        "sparseformer_nano.untrained": pretrained_cfg(64, first_conv="stem.conv"),
    }
)


def _sparseformer(name: str, pretrained: bool, **kwargs: Any) -> SparseFormer:
    kwargs.setdefault("dense", bool(kwargs.get("features_only", False)))
    return build(SparseFormer, name, pretrained, **kwargs)


@register
def sparseformer_tiny(pretrained: bool = False, **kwargs: Any) -> SparseFormer:
    """SparseFormer-T. Reported: 32M parameters, 2.0 GFLOPs, 81.0 top-1 at 224 px."""
    size = dict(num_tokens=49, focus_dim=256, cortex_dim=512, depth=8)
    return _sparseformer("sparseformer_tiny", pretrained, **(size | kwargs))


@register
def sparseformer_small(pretrained: bool = False, **kwargs: Any) -> SparseFormer:
    """SparseFormer-S. Reported: 48M parameters, 3.8 GFLOPs, 82.0 top-1 at 224 px."""
    size = dict(num_tokens=64, focus_dim=320, cortex_dim=640, depth=8)
    return _sparseformer("sparseformer_small", pretrained, **(size | kwargs))


@register
def sparseformer_base(pretrained: bool = False, **kwargs: Any) -> SparseFormer:
    """SparseFormer-B. Reported: 81M parameters, 7.8 GFLOPs, 82.6 top-1 at 224 px."""
    size = dict(num_tokens=81, focus_dim=384, cortex_dim=768, depth=10)
    return _sparseformer("sparseformer_base", pretrained, **(size | kwargs))


@register
def sparseformer_nano(pretrained: bool = False, **kwargs: Any) -> SparseFormer:
    """SparseFormer for 64 to 128 px and CPUs; not in the paper. 36 tokens take 16 samples each from 48 channels."""
    size = dict(num_tokens=36, focus_dim=128, cortex_dim=192, depth=6, heads=8, points=16, channels=48)
    return _sparseformer("sparseformer_nano", pretrained, **(size | kwargs))
