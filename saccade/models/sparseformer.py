"""SparseFormer: sparse visual recognition via limited latent tokens (arXiv 2304.03768).

group     tokens.regions.RegionTokenizer      Eqs. 2-9
relate    layers.attention.SelfAttention      Sec. 3.2
put back  tokens.locate.locate                Appendix A.2, for `features_only`; classification needs no features

Tokens are called latent tokens in the paper, and their regions RoIs. A small "focusing" transformer samples the image
several times with the same weights; a large "cortex" transformer samples once more. Where the paper is silent, the
authors' code decides (their weights reproduce their outputs here): 64 heads; LayerNorm after the mean over tokens; no
factor 0.5 on the offsets of Eq. 3; image features normalised over channels without affine parameters. Their training
code differs in four small constants (`training_code=True`). With fewer than 32 points their code mixes to 32; here, as
in the paper and in the cost of its Table 3c, to as many as were sampled.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates, drop_path, trunc_normal_
from timm.models import checkpoint, generate_default_cfgs, register_notrace_function
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from saccade import ops
from saccade.layers.attention import SelfAttention
from saccade.layers.linear import init_linear
from saccade.layers.mlp import TokenMlp
from saccade.layers.norm import TokenNorm
from saccade.models.classifier import Classifier
from saccade.models.registry import build, choose, create_model, leaf, pretrained_cfg, register
from saccade.ops import plain_layer
from saccade.ops.layer_norm import plain_norm
from saccade.ops.pooling import conv_pool_relu
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
STRIDES = (4, 8, 16, 32)  # of the dense features


@register_notrace_function
def at_least_float32(values: Tensor) -> Tensor:
    """Coordinates in float32, whatever the dtype of the model; in float64 where it is that."""
    return values if values.dtype == torch.float64 else values.float()


@plain_layer
@leaf
class PixelNorm(nn.Module):
    """Normalise every pixel over its channels without affine parameters, in the dtype of the features."""

    def __init__(self, eps: float = 1e-5, unbiased: bool = False):
        super().__init__()
        self.eps = eps
        self.unbiased = unbiased

    def pixel_norm_constants(self, channels: int) -> tuple[float, float]:
        """eps and scale such that the output is `layer_norm(pixels, eps) * scale`."""
        ratio = (channels - 1) / channels if self.unbiased else 1.0  # biased over unbiased variance
        return self.eps * ratio, ratio**0.5

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W); on channels-last memory the permutes are views."""
        eps, scale = self.pixel_norm_constants(features.shape[1])
        return (plain_norm(features.permute(0, 2, 3, 1), eps) * scale).permute(0, 3, 1, 2)


class EarlyConv(nn.Module):
    """A ResNet's stem without norm: 7x7 convolution of stride 2, 3x3 max pooling, ReLU (SparseFormer Sec. 3.2).

    Pooling before ReLU is the same function at a quarter of the work.
    """

    def __init__(self, in_chans: int, dim: int, norm: nn.Module):
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, 7, stride=2, padding=3)
        self.norm = norm

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/4, W/4)."""
        return conv_pool_relu(images, self.conv, self.norm)


class PatchConv(nn.Module):
    """Patch embedding of a ViT/8, zero-padded to complete patches (SparseFormer Table 3d)."""

    def __init__(self, in_chans: int, dim: int, norm: nn.Module):
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, 8, stride=8)
        self.norm = norm

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/8, W/8)."""
        return self.norm(self.conv(F.pad(images, (0, -images.shape[3] % 8, 0, -images.shape[2] % 8))))


class SparseFormerBlock(nn.Module):
    """Pre-norm residual block: self-attention, sampling if there is a tokenizer, MLP (SparseFormer Sec. 3.2)."""

    def __init__(self, dim: int, num_heads: int, mlp: nn.Module, tokenizer: nn.Module | None = None, eps: float = 1e-6):
        super().__init__()
        self.norm1 = TokenNorm(dim, eps)
        self.attn = SelfAttention(dim, num_heads)
        self.tokenizer = tokenizer
        self.norm2 = TokenNorm(dim, eps)
        self.mlp = mlp

    def forward(self, tokens: Tensor, regions: Tensor, features: Tensor, drop: float) -> tuple[Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W), drop path rate -> tokens, regions."""
        tokens = tokens + drop_path(self.attn(self.norm1(tokens)), drop, self.training)  # relate
        if self.tokenizer is not None:
            tokens, regions, _ = self.tokenizer(tokens, regions, features, drop)  # group
        return tokens + drop_path(self.mlp(self.norm2(tokens)), drop, self.training), regions


@leaf
class RepeatedBlocks(nn.Module):
    """Blocks run `repeats` times with the same weights; every pass has its own drop path rate.

    With `stage_dim` every pass first adds an embedding of its own, of this width (SparseFormer v2).
    """

    def __init__(self, blocks: Sequence[nn.Module], rates: Sequence[float], repeats: int = 1, stage_dim: int = 0):
        super().__init__()
        self.stage_embedding = nn.Parameter(torch.randn(len(rates), stage_dim)) if stage_dim else None
        self.blocks = nn.ModuleList(blocks)
        self.rates = list(rates)
        self.repeats = repeats
        self.grad_checkpointing = False

    def forward(
        self, tokens: Tensor, regions: Tensor, features: Tensor, passes: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W) -> tokens, regions.

        `passes` collects the tokens after every block.
        """
        for step in range(self.repeats * len(self.blocks)):
            block = self.blocks[step % len(self.blocks)]
            if self.stage_embedding is not None:
                tokens = tokens + self.stage_embedding[step].to(tokens.dtype)
            if self.grad_checkpointing:
                tokens, regions = checkpoint(block, tokens, regions, features, self.rates[step])
            else:
                tokens, regions = block(tokens, regions, features, self.rates[step])
            if passes is not None:
                passes.append(tokens)
        return tokens, regions


class TokenHead(nn.Module):
    """Mean over tokens, norm, linear classifier; without pooling, logits of every token."""

    pools = ("avg", "")

    def __init__(
        self, dim: int, num_classes: int, global_pool: str = "avg", drop: float = 0.0, bias: bool = True,
        eps: float = 1e-6,
    ):  # fmt: skip
        super().__init__()
        choose("global_pool", global_pool, self.pools)
        self.dim = dim
        self.bias = bias
        self.global_pool = global_pool
        self.norm: nn.Module = TokenNorm(dim, eps)
        self.drop = nn.Dropout(drop)
        self.fc = nn.Linear(dim, num_classes, bias) if num_classes > 0 else nn.Identity()

    def reset(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            choose("global_pool", global_pool, self.pools)
            self.global_pool = global_pool
        self.fc = nn.Linear(self.dim, num_classes, self.bias) if num_classes > 0 else nn.Identity()
        init_weights(self.fc)

    def pool(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> their normalised mean (B, D), or all of them."""
        return self.norm(tokens.mean(1) if self.global_pool == "avg" else tokens)

    def forward(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """tokens (B, M, D) -> logits (B, K), or (B, M, K) without pooling."""
        pooled = self.drop(self.pool(tokens))
        return pooled if pre_logits else self.fc(pooled)


class SparseFormer(Classifier):
    """Latent tokens that sample the image in regions they move themselves; timm's interface.

    Args:
        num_tokens: N, any number; a square one starts on a grid. Cost grows with it, not with the image.
        focus_dim, cortex_dim: widths of the focusing and of the cortex transformer.
        repeats: passes of the focusing transformer; 0 is "nil" of Table 3b: no passes, regions and points fixed.
        depth: blocks of the cortex transformer; the first one samples, too.
        heads: attention heads, at both widths.
        points: samples per token and sampling step.
        channels: width of the sampled features (that of the image for "rgb").
        image_features: "early_conv" (stride 4), "vit8" (8x8 patches) or "rgb" (the image itself), see Table 3d.
        decoding: "adaptive", "static" or "linear" (Table 3e).
        region_init: "half", "cell" or "whole" sides of the first regions (Table 9).
        restrict_gradient: clamp the gradient of sampling points, see `RegionTokenizer` and `set_loss_scale`.
        point_scale: 0.5 follows Eq. 3 literally, see `PointPlacer`.
        training_code: the small constants of the authors' training code; same weights, logits 1 % different.
        dense: whether dense features (`features_only=True`) have learned queries, keys and values; `eval()` warns
            until they are trained or loaded. Otherwise dense features have no parameters.
    """

    axes = 2  # of the sampled features: x and y; a video adds time
    precise = ("regions",)  # coordinates stay float32 when a copy is cast
    num_prefix_tokens = 0  # tokens without a region, before the latent tokens
    token_parameters = ("embeddings", "regions")  # these have one row per latent token
    output_formats = ("NCHW", "NLC")

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
        super().__init__(in_chans, num_classes, cortex_dim)
        choose("image_features", image_features, ("early_conv", "vit8", "rgb"))
        choose("decoding", decoding, ("adaptive", "static", "linear"))
        choose("region_init", region_init, ("half", "cell", "whole"))
        if num_tokens < 1 or depth < 1 or repeats < 0:
            raise ValueError(
                f"expected num_tokens >= 1, depth >= 1 and repeats >= 0; got {num_tokens}, {depth}, {repeats}."
            )
        self.feature_info = feature_info(cortex_dim)
        self.stem_dim = channels = in_chans if image_features == "rgb" else channels
        norm = PixelNorm(1e-7, unbiased=True) if training_code else PixelNorm()
        stems = {"early_conv": EarlyConv, "vit8": PatchConv}
        self.stem = nn.Identity() if image_features == "rgb" else stems[image_features](in_chans, channels, norm)
        self.embeddings = nn.Parameter(torch.empty(num_tokens, focus_dim))
        regions = region_grid(num_tokens, region_init)
        if repeats:
            self.regions = nn.Parameter(regions)
        else:
            self.register_buffer("regions", regions)

        def tokenizer(dim: int) -> RegionTokenizer:
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

        def block(dim: int, samples: bool) -> SparseFormerBlock:
            return SparseFormerBlock(
                dim, heads, TokenMlp(dim, int(dim * mlp_ratio)), tokenizer(dim) if samples else None
            )

        rates: Any = calculate_drop_path_rates(drop_path_rate, repeats + depth)  # per pass, not per block
        self.focus = RepeatedBlocks([block(focus_dim, True)] if repeats else [], rates[:repeats], repeats)
        self.bridge = nn.Sequential(nn.Linear(focus_dim, cortex_dim), TokenNorm(cortex_dim))
        self.cortex = RepeatedBlocks([block(cortex_dim, i == 0) for i in range(depth)], rates[repeats:])
        self.locate = LocationAttention(channels, cortex_dim) if dense else None
        self.head = TokenHead(cortex_dim, num_classes, global_pool, drop_rate)
        self.apply(init_weights)
        trunc_normal_(self.embeddings, std=1.0)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters(recurse=False) if name == "regions"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        cortex = r"^cortex" if coarse else r"^cortex\.blocks\.(\d+)"
        before = r"^focus|^bridge|^resample|^class_token"  # the last two in v2
        blocks = [(before, (-1,)), (cortex, (0,) if coarse else None), (r"^locate", (99999,))]
        return {"stem": r"^stem|^embeddings|^regions", "blocks": blocks}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.focus.grad_checkpointing = enable
        self.cortex.grad_checkpointing = enable

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Scale the bound on gradients of sampling points with the loss: `scaler.get_scale()`, before every backward.

        Only float16 training scales its loss.
        """
        for module in self.modules():
            if isinstance(module, RegionTokenizer):
                module.loss_scale.fill_(scale)

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Load all but `token_parameters` where the number of tokens differs (SparseFormer Sec. 4.1)."""
        new: dict[str, str] = {}
        theirs = len(state_dict.get("regions", self.regions))
        if theirs != len(self.regions):
            new = dict.fromkeys(
                self.token_parameters, f"{len(self.regions)} latent tokens, the checkpoint has {theirs}"
            )
        if self.locate is not None and not any(key.startswith("locate.") for key in state_dict):
            dense = (name for name in self.state_dict() if name.startswith("locate."))
            new |= dict.fromkeys(dense, "a classifier has no dense features; train them with the dense task")
        return {key: value for key, value in state_dict.items() if key not in new}, new

    def intermediates(
        self, images: Tensor, indices: int | list[int] | None, stop_early: bool, output_fmt: str
    ) -> tuple[Tensor, list[Tensor]]:
        """images (B, 3, H, W) -> the tokens of `forward_features`, and intermediates in one of `output_formats`.

        "NLC": the tokens (B, M, D) after every pass, `repeats` of the focusing, `depth` of the cortex transformer.
        "NCHW" (images only, the default): the last latent tokens put back onto the grid at strides 4, 8, 16 and 32
        (SparseFormer Appendix A.2): by location (see `tokens.locate`) at stride 4, then average-pooled. The norm
        follows the mean over tokens, so none is applied; `stop_early` has no effect, as all features come from the
        last tokens.
        """
        passes: list[Tensor] = []
        tokens, regions, features = self.sample(images, passes)
        latent = tokens[:, self.num_prefix_tokens :]
        outputs = passes if output_fmt == "NLC" else self.pyramid(images, latent, regions, features)
        take, _ = feature_take_indices(len(outputs), indices)
        return tokens, [outputs[i] for i in take]

    def pyramid(self, images: Tensor, tokens: Tensor, regions: Tensor, features: Tensor) -> list[Tensor]:
        """Tokens (B, M, D) back on the grid: features (B, D, H/4, W/4), (B, D, H/8, W/8), ... to stride 32."""
        height, width = -(-images.shape[2] // STRIDES[0]), -(-images.shape[3] // STRIDES[0])
        if self.locate is None:
            maps = [locate(tokens, regions, height, width)]
        else:
            if features.shape[2] != height or features.shape[3] != width:
                features = F.interpolate(features, (height, width), mode="bilinear", align_corners=False)
            maps = [self.locate(features, tokens, regions)]
        for _ in STRIDES[1:]:
            maps.append(F.avg_pool2d(maps[-1], 2, ceil_mode=True))
        return maps

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the head; all features come from the last tokens, so nothing else can go."""
        take, _ = feature_take_indices(len(STRIDES), indices)
        if prune_norm or prune_head:
            self.head.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_tokens(
        self, images: Tensor, passes: list[Tensor] | None = None, extent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """images (B, 3, H, W) -> latent tokens (B, M, D), their regions (B, M, 4), the sampled features (B, C, h, w).

        `passes` collects the tokens after every pass. `extent` (B, 2) is the fraction of width and height that each
        image fills in a padded batch: tokens start inside it, and everything they do is relative to their region.
        """
        tokens, regions, features = self.sample(images, passes, extent)
        return tokens[:, self.num_prefix_tokens :], regions, features

    def extract_features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> the features that are sampled (B, C, h, w)."""
        return self.stem(self.prepared(images))

    def initial_tokens(self, features: Tensor, extent: Tensor | None) -> tuple[Tensor, Tensor]:
        """Learned tokens (B, M, D) and regions (B, M, 4) of a batch; a single embedding serves all tokens."""
        batch, copies = features.shape[0], self.regions.shape[0] // self.embeddings.shape[0]
        tokens = self.embeddings.to(features.dtype).repeat(batch, copies, 1)  # torch's FLOP counter fails on views
        regions = at_least_float32(self.regions).repeat(batch, 1, 1)
        if extent is not None:
            regions = regions * extent.to(regions.dtype).repeat(1, 2).unsqueeze(1)
        return tokens, regions

    @ops.model_pass
    def sample(
        self, images: Tensor, passes: list[Tensor] | None = None, extent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """images (B, 3, H, W) -> tokens (B, M, D), regions (B, M, 4), the sampled features (B, C, h, w)."""
        return self.sample_features(self.extract_features(images), passes, extent)

    def sample_features(
        self, features: Tensor, passes: list[Tensor] | None = None, extent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), regions (B, M, 4), features."""
        tokens, regions = self.initial_tokens(features, extent)
        tokens, regions = self.focus(tokens, regions, features, passes)
        tokens, regions = self.cortex(self.bridge(tokens), regions, features, passes)
        return tokens, regions, features

    def forward_features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> tokens (B, M, D), with `num_prefix_tokens` others first."""
        return self.sample(images)[0]


def clip_vision(name: str = "sparseformer_btsp_clip_base", pretrained: bool = True, **kwargs: Any) -> nn.Module:
    """An image tower for open_clip: `clip.visual = clip_vision("sparseformer_btsp_clip_base")`.

    The text tower must be that of the same CLIP: ViT-B-16 for base, ViT-L-14 for large, both of OpenAI.
    """
    if "_clip_" not in name:
        raise ValueError(f"expected a SparseFormer aligned with CLIP (sparseformer_btsp_clip_*), got {name!r}.")
    model: Any = create_model(name, pretrained, **kwargs)
    config = model.pretrained_cfg  # open_clip reads its preprocessing from these attributes
    model.image_size, model.image_mean, model.image_std = config["input_size"][1:], config["mean"], config["std"]
    return model


def feature_info(dim: int) -> list[dict[str, Any]]:
    """timm's description of the pyramid. The names are no modules, but transformers requires different ones."""
    return [{"num_chs": dim, "reduction": stride, "module": f"pyramid.{stride}"} for stride in STRIDES]


def init_weights(module: nn.Module) -> None:
    """Linear layers truncated normal, convolutions Kaiming normal, sampling modules their own way (appendix A.3)."""
    if isinstance(module, nn.Linear):
        init_linear(module)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif initialise := getattr(module, "init_weights", None):
        initialise()


_RELEASED: dict[str, Any] = {"first_conv": "stem.conv", "crop_pct": 0.875, "interpolation": "bilinear"}
default_cfgs = generate_default_cfgs(
    {
        **{f"sparseformer_{size}.in1k": pretrained_cfg(**_RELEASED) for size in ("tiny", "small", "base")},
        "sparseformer_nano.untrained": pretrained_cfg(64, first_conv="stem.conv"),
    }
)


@register
def sparseformer_tiny(pretrained: bool = False, **kwargs: Any) -> SparseFormer:
    """SparseFormer-T. Reported: 32M parameters, 2.0 GFLOPs, 81.0 top-1 at 224 px."""
    size = dict(num_tokens=49, focus_dim=256, cortex_dim=512, depth=8)
    return build(SparseFormer, "sparseformer_tiny", pretrained, **(size | kwargs))


@register
def sparseformer_small(pretrained: bool = False, **kwargs: Any) -> SparseFormer:
    """SparseFormer-S. Reported: 48M parameters, 3.8 GFLOPs, 82.0 top-1 at 224 px."""
    size = dict(num_tokens=64, focus_dim=320, cortex_dim=640, depth=8)
    return build(SparseFormer, "sparseformer_small", pretrained, **(size | kwargs))


@register
def sparseformer_base(pretrained: bool = False, **kwargs: Any) -> SparseFormer:
    """SparseFormer-B. Reported: 81M parameters, 7.8 GFLOPs, 82.6 top-1 at 224 px."""
    size = dict(num_tokens=81, focus_dim=384, cortex_dim=768, depth=10)
    return build(SparseFormer, "sparseformer_base", pretrained, **(size | kwargs))


@register
def sparseformer_nano(pretrained: bool = False, **kwargs: Any) -> SparseFormer:
    """SparseFormer for 64 to 128 px and CPUs; not in the paper. 36 tokens take 16 samples each from 48 channels."""
    size = dict(num_tokens=36, focus_dim=128, cortex_dim=192, depth=6, heads=8, points=16, channels=48)
    return build(SparseFormer, "sparseformer_nano", pretrained, **(size | kwargs))
