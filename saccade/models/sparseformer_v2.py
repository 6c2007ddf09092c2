"""SparseFormer v2: bootstrapping SparseFormers from vision foundation models (arXiv 2312.01987).

group     tokens.regions.RegionTokenizer      arXiv 2304.03768 Eqs. 2-6, the sampling of SparseFormer
relate    layers.attention.SelfAttention      Fig. 2: the blocks of the source ViT
put back  tokens.locate.locate                arXiv 2304.03768 Appendix A.2, for `features_only`

A SparseFormer whose cortex consists of the last two thirds of a pretrained ViT's blocks. Tokens are called latent
tokens in the paper, and their regions RoIs. A small focusing unit runs several times with the same weights; every pass
samples first and adjusts the regions last. A second unit samples once more at the width of the ViT, then a class token
joins, and the ViT's blocks and head follow. `bootstrap` builds one from any timm ViT.

Which blocks are inherited, tuned and frozen is in the abstract and in Fig. 2; all else follows the authors' code (same
weights, same outputs). It differs from SparseFormer v1 in the order of a pass, border padding, LayerNorm eps 1e-5,
mixing without biases, and in position, stage embedding and class token, which v1 does not have.
"""

from typing import Any

import timm
import torch
from timm.data.constants import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.layers import calculate_drop_path_rates, trunc_normal_
from timm.layers.activations import quick_gelu
from timm.models import generate_default_cfgs
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from saccade.layers.mlp import TokenMlp
from saccade.models.card import Card, preprocess_of
from saccade.models.classifier import Classifier
from saccade.models.official import vit as official_vit
from saccade.models.registry import build, choose, leaf, pretrained_cfg, register
from saccade.models.sparseformer import (
    EarlyConv,
    PixelNorm,
    RepeatedBlocks,
    SparseFormer,
    SparseFormerBlock,
    TokenHead,
    feature_info,
    init_weights,
)
from saccade.tokens.locate import LocationAttention
from saccade.tokens.regions import (
    MlpAdjuster,
    PointPlacer,
    ProductDecoder,
    RegionPosition,
    RegionTokenizer,
    padded_region_grid,
    point_grid,
)

__all__ = ["SparseFormerV2", "bootstrap"]
EPS = 1e-5  # of every LayerNorm
HEAD_DIM = 64
GENERATOR_DIM = 128
MIN_MIXED_POINTS = 32
REBUILD = "sparseformer_btsp_augreg_base"  # name under which a bootstrapped model is built again, with its options


class QuickGeluMlp(TokenMlp):
    """Two linear layers with x * sigmoid(1.702 x) between them, as in OpenAI's CLIP."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> tokens (B, M, D)."""
        return self.fc2(quick_gelu(self.fc1(tokens)))


def encoder_block(dim: int, num_heads: int, mlp_ratio: float, act: str = "gelu") -> SparseFormerBlock:
    """Pre-norm self-attention and MLP: a block of a ViT without layer scale. `act` is "gelu" or "quick_gelu"."""
    mlp = {"gelu": TokenMlp, "quick_gelu": QuickGeluMlp}[act](dim, round(dim * mlp_ratio))
    return SparseFormerBlock(dim, num_heads, mlp, eps=EPS)


@leaf
class SamplingUnit(nn.Module):
    """Sample in the regions as they are, then add the position of the regions."""

    def __init__(self, dim: int, channels: int, points: int, restrict_gradient: bool):
        super().__init__()
        placer = PointPlacer(dim, points, norm_eps=EPS)
        decoder = ProductDecoder(dim, channels, points, max(points, MIN_MIXED_POINTS), GENERATOR_DIM, EPS)
        self.tokenizer = RegionTokenizer(None, placer, decoder, restrict_gradient)
        self.position = RegionPosition(dim, eps=EPS)

    def forward(self, tokens: Tensor, regions: Tensor, features: Tensor, drop: float) -> Tensor:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W), drop path rate -> tokens (B, M, D)."""
        tokens, _, _ = self.tokenizer(tokens, regions, features, drop)  # group
        return self.position(tokens, regions)


class FocusingBlock(nn.Module):
    """One pass of the focusing unit: sample, relate, adjust the regions for the next pass."""

    def __init__(self, sampling: SamplingUnit, encoder: SparseFormerBlock, adjuster: MlpAdjuster):
        super().__init__()
        self.sampling = sampling
        self.encoder = encoder
        self.adjuster = adjuster

    def forward(self, tokens: Tensor, regions: Tensor, features: Tensor, drop: float) -> tuple[Tensor, Tensor]:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W), drop path rate -> tokens, regions."""
        tokens = self.sampling(tokens, regions, features, drop)
        tokens, regions = self.encoder(tokens, regions, features, drop)  # relate
        return tokens, self.adjuster(tokens, regions)


class ClassTokenHead(TokenHead):
    """Class token ("token"), mean of the other tokens ("avg") or every token (""), then norm and linear classifier.

    `norm_first` applies the norm to the tokens before their mean.
    """

    pools = ("token", "avg", "")

    def __init__(self, dim: int, num_classes: int, global_pool: str, drop: float, bias: bool, norm_first: bool):
        super().__init__(dim, num_classes, global_pool, drop, bias, EPS)
        self.norm_first = norm_first

    def pool(self, tokens: Tensor) -> Tensor:
        """tokens (B, 1 + M, D) -> (B, D), or (B, 1 + M, D) without pooling."""
        if self.global_pool == "token":
            return self.norm(tokens[:, 0])
        if self.global_pool == "avg":
            return self.norm(tokens[:, 1:]).mean(1) if self.norm_first else self.norm(tokens[:, 1:].mean(1))
        return self.norm(tokens)


class SparseFormerV2(SparseFormer):
    """Latent tokens that sample the image in regions they move themselves, related by the blocks of a ViT.

    timm's interface. `forward_features` returns the class token and the latent tokens (B, 1 + M, D), `forward_tokens`
    the latent tokens with their regions.

    Args:
        num_tokens: tokens of the cortex: M latent tokens and the class token.
        focus_dim, cortex_dim: widths of the focusing unit and of the cortex (the source ViT's).
        repeats: passes of the focusing unit.
        depth: blocks of the cortex.
        cortex_heads: attention heads of the cortex; None for cortex_dim / 64, as the focusing unit has.
        points: samples per token and sampling step.
        channels: width of the sampled features.
        act: "gelu" or "quick_gelu", in the MLPs of the cortex; the focusing unit has GELU.
        head_bias: bias of the last linear layer. CLIP's projection has none.
        norm_first: apply the last norm before the mean of the tokens, with global_pool="avg".
        extra_regions: initial regions of tokens that exceed a square number: "whole" image, as in the authors' code,
            where such tokens are equal and stay so in training; or "random" centres.
        restrict_gradient: clamp the gradient of sampling points, see `RegionTokenizer` and `set_loss_scale`.
        dense: as in `SparseFormer`.
    """

    num_prefix_tokens = 1  # the class token
    token_parameters = ("regions",)

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        num_tokens: int = 49,
        focus_dim: int = 384,
        cortex_dim: int = 768,
        repeats: int = 4,
        depth: int = 8,
        cortex_heads: int | None = None,
        points: int = 16,
        channels: int = 64,
        mlp_ratio: float = 4.0,
        act: str = "gelu",
        head_bias: bool = True,
        norm_first: bool = False,
        extra_regions: str = "whole",
        restrict_gradient: bool = False,
        dense: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        Classifier.__init__(self, in_chans, num_classes, cortex_dim)  # v1's interface, but none of its parts
        choose("act", act, ("gelu", "quick_gelu"))
        choose("extra_regions", extra_regions, ("whole", "random"))
        if num_tokens < 2 or depth < 1 or repeats < 1:
            raise ValueError(
                f"expected num_tokens >= 2, depth >= 1 and repeats >= 1; got {num_tokens}, {depth}, {repeats}."
            )
        self.feature_info = feature_info(cortex_dim)
        self.stem_dim = channels
        self.stem = EarlyConv(in_chans, channels, PixelNorm())
        self.embeddings = nn.Parameter(torch.empty(1, focus_dim))  # one for all tokens
        self.regions = nn.Parameter(padded_region_grid(num_tokens - 1, extra_regions))
        self.class_token = nn.Parameter(torch.randn(1, cortex_dim))
        rates: Any = calculate_drop_path_rates(drop_path_rate, repeats + 1 + depth)  # per pass, not per block
        block = FocusingBlock(
            SamplingUnit(focus_dim, channels, points, restrict_gradient),
            encoder_block(focus_dim, max(focus_dim // HEAD_DIM, 1), 4.0),
            MlpAdjuster(focus_dim, EPS),
        )
        self.focus = RepeatedBlocks([block], rates[:repeats], repeats, focus_dim)
        self.bridge = nn.Linear(focus_dim, cortex_dim)
        self.resample = SamplingUnit(cortex_dim, channels, points, restrict_gradient)
        self.resample_rate = rates[repeats]
        heads = cortex_heads or cortex_dim // HEAD_DIM
        blocks = [encoder_block(cortex_dim, heads, mlp_ratio, act) for _ in range(depth)]  # of the source ViT
        self.cortex = RepeatedBlocks(blocks, rates[repeats + 1 :])
        self.locate = LocationAttention(channels, cortex_dim) if dense else None
        self.head = ClassTokenHead(cortex_dim, num_classes, global_pool, drop_rate, head_bias, norm_first)
        self.apply(init_weights_v2)
        trunc_normal_(self.embeddings, std=1.0)

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze all parameters, as open_clip's `lock_image_tower` does."""
        if unlocked_groups:
            raise ValueError(f"expected unlocked_groups=0, got {unlocked_groups}. Use bootstrap_groups() to choose.")
        self.requires_grad_(False)

    def bootstrap_groups(self) -> dict[str, list[str]]:
        """Names of all parameters by their role when a ViT is turned into this model: "new", "tuned" and "frozen".

        The focusing unit and whatever else the ViT does not have is new, the first half of the cortex (blocks N/3 to
        2N/3 of N) is tuned, the second half, the last norm and the last linear layer stay those of the ViT.
        """
        tuned = tuple(f"cortex.blocks.{i}." for i in range(len(self.cortex.blocks) // 2))
        groups: dict[str, list[str]] = {"new": [], "tuned": [], "frozen": []}
        for name, _ in self.named_parameters():
            inherited = name.startswith(("cortex.", "head."))
            groups["tuned" if name.startswith(tuned) else "frozen" if inherited else "new"].append(name)
        return groups

    def sample_features(
        self, features: Tensor, passes: list[Tensor] | None = None, extent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """features (B, C, H, W) -> class token and latent tokens (B, 1 + M, D), regions (B, M, 4), features."""
        tokens, regions = self.initial_tokens(features, extent)
        tokens, regions = self.focus(tokens, regions, features, passes)
        tokens = self.resample(self.bridge(tokens), regions, features, self.resample_rate)
        if passes is not None:
            passes.append(tokens)
        class_token = self.class_token.to(tokens.dtype).repeat(tokens.shape[0], 1, 1)
        tokens, regions = self.cortex(torch.cat([class_token, tokens], dim=1), regions, features, passes)
        return tokens, regions, features


def init_weights_v2(module: nn.Module) -> None:
    """As SparseFormer v1; the grid of points has x fastest."""
    init_weights(module)
    if isinstance(module, PointPlacer):
        with torch.no_grad():
            module.grid.copy_(point_grid(module.grid.numel() // 2).flip(-1).flatten())


def bootstrap(
    vit: str | nn.Module,
    num_tokens: int = 49,
    focus_dim: int | None = None,
    pretrained: bool = True,
    freeze: bool = True,
    **options: Any,
) -> SparseFormerV2:
    """A SparseFormer whose cortex, last norm and last linear layer are those of a timm ViT (Fig. 2).

    Of N blocks, the first N/3 are dropped, block N/3 + k becomes cortex block k. Patch embedding, position embedding
    and class token of the ViT are not used. ViTs whose other parts have no place (register tokens, rotary or relative
    positions, attention pooling, other norms or activations) are refused. All that `bootstrap_groups` calls "new" is
    randomly initialised: train it (and the tuned blocks) to reproduce the ViT's final token, on images without labels
    (`distill.features` of a recipe). `saccade.save_checkpoint` saves the model with its card, so that `saccade.load`
    builds it again.

    Args:
        vit: a name, created with timm, or a timm VisionTransformer.
        num_tokens: latent tokens and class token; the paper takes a quarter of the ViT's patches.
        focus_dim: width of the focusing unit; None for half the width of the ViT.
        pretrained: whether the weights of a `vit` given by name are downloaded.
        freeze: whether parameters of the frozen group stop requiring gradients.
        options: others of `SparseFormerV2`. Tokens that exceed a square number start at "random" regions, so that
            they can become different; the authors' code starts them all at the whole image.
    """
    source: Any = timm.create_model(vit, pretrained=pretrained) if isinstance(vit, str) else vit
    blocks: list[Any] = list(getattr(source, "blocks", ()))
    _check_vit(source, blocks)
    inherited = _inherited_options(source, blocks)
    if clash := sorted(inherited.keys() & options.keys()):
        raise ValueError(f"{', '.join(clash)} come from the ViT. Leave them out; reset_classifier changes the head.")
    half = source.embed_dim // 2
    width = half if half < 2 * HEAD_DIM else half - half % HEAD_DIM  # heads of 64 channels
    own: dict[str, Any] = {"num_tokens": num_tokens, "focus_dim": focus_dim or width, "extra_regions": "random"}
    chosen = inherited | own | options
    model = SparseFormerV2(**chosen)
    weights = official_vit.convert(source.state_dict(), len(blocks) // 3, len(blocks))
    model.load_state_dict(model.state_dict() | weights)
    if freeze:
        for name in model.bootstrap_groups()["frozen"]:
            model.get_parameter(name).requires_grad_(False)
    card = _card(source, chosen)
    preprocess = card.preprocess
    changes = {key: getattr(preprocess, key) for key in ("mean", "std", "crop_pct", "interpolation")}
    cfg = pretrained_cfg(
        preprocess.size, first_conv="stem.conv", num_classes=card.num_classes, architecture=REBUILD, **changes
    )
    model.pretrained_cfg = model.default_cfg = cfg  # type: ignore[assignment] # nn.Module declares Tensor | Module
    model.card = card  # type: ignore[assignment]
    return model


def _card(source: Any, options: dict[str, Any]) -> Card:
    """The card of a bootstrapped model: its options, and classes and preprocessing of the ViT."""
    theirs: Any = getattr(source, "card", None)
    preprocess = theirs.preprocess if theirs else preprocess_of(source)
    if (size := getattr(getattr(source, "patch_embed", None), "img_size", None)) is not None:
        preprocess = preprocess._replace(size=size[0])  # timm's configuration has that of the name
    kwargs = {key: value for key, value in options.items() if key != "num_classes"}
    return Card(REBUILD, options["num_classes"], kwargs, list(theirs.classes) if theirs else [], preprocess)


def _inherited_options(source: Any, blocks: list[Any]) -> dict[str, Any]:
    """Options of `SparseFormerV2` that follow from the ViT."""
    last, mlp = getattr(source, "head", None), blocks[0].mlp
    has_classes = isinstance(last, nn.Linear)
    pool = "avg" if getattr(source, "global_pool", "token") == "avg" else "token"
    return {
        "in_chans": getattr(source, "in_chans", 3),
        "cortex_dim": source.embed_dim,
        "cortex_heads": blocks[0].attn.num_heads,
        "depth": len(blocks) - len(blocks) // 3,
        "mlp_ratio": mlp.fc1.out_features / source.embed_dim,
        "act": _activation(mlp.act),
        "global_pool": pool,
        "norm_first": pool == "avg" and isinstance(source.norm, nn.LayerNorm),
        "num_classes": last.out_features if has_classes else 0,
        "head_bias": has_classes and last.bias is not None,
    }


def _check_vit(source: Any, blocks: list[Any]) -> None:
    """Raise a ValueError unless the blocks of the ViT, its last norm and its head have a place in a SparseFormer v2."""
    name = type(source).__name__
    _require(len(blocks) >= 3, "a timm ViT of at least 3 blocks", f"{name} with {len(blocks)}")
    for block in blocks:
        _require(type(block) is Block, "blocks of a plain timm ViT", f"{name} with {type(block).__name__}")
        names = set(block.state_dict())
        has_layers = {f"{layer}.weight" for layer in official_vit.LAYERS} <= names <= official_vit.KEYS
        other = ", ".join(sorted(names - official_vit.KEYS)[:3]) or "other layers"
        _require(has_layers, "blocks of a plain timm ViT", f"{name} with {other}")
        norm, mlp = block.norm1, block.mlp
        kinds = f"{name} with {type(norm).__name__} and {type(mlp).__name__}"
        _require(isinstance(norm, nn.LayerNorm) and type(mlp) is timm.layers.Mlp, "a ViT with LayerNorm and Mlp", kinds)
    _activation(blocks[0].mlp.act)
    pool = getattr(source, "global_pool", "token")
    _require(pool in ("token", "avg", ""), "a ViT with class token or mean pooling", f"{name} with {pool!r}")
    norms = [norm for norm in (source.norm, source.fc_norm) if not isinstance(norm, nn.Identity)]
    has_norm = len(norms) == 1 and isinstance(norms[0], nn.LayerNorm)
    _require(has_norm, "a ViT with one LayerNorm after its blocks", f"{len(norms)} in {name}")
    extras = {"num_reg_tokens": "register tokens", "head_dist": "a distillation token", "rope": "rotary positions"}
    for attribute, what in extras.items():
        is_plain = getattr(source, attribute, None) in (None, 0)
        _require(is_plain, "a plain ViT", f"{what}, which a SparseFormer v2 does not have")


def _activation(act: nn.Module) -> str:
    if isinstance(act, timm.layers.QuickGELU):
        return "quick_gelu"
    is_gelu = isinstance(act, timm.layers.GELU) or (isinstance(act, nn.GELU) and act.approximate == "none")
    _require(is_gelu, "a ViT with GELU or QuickGELU", str(act))
    return "gelu"


def _require(condition: bool, expected: str, got: str) -> None:
    if not condition:
        raise ValueError(f"expected {expected}, got {got}. Use another model.")


def _cfg(num_classes: int = 1000, **changes: Any) -> dict[str, Any]:
    common = {"crop_pct": 0.875, "interpolation": "bilinear", "license": "mit", "first_conv": "stem.conv"}
    return pretrained_cfg(**({"num_classes": num_classes} | common | changes))


_AUGREG: dict[str, Any] = {"mean": IMAGENET_INCEPTION_MEAN, "std": IMAGENET_INCEPTION_STD}
_CLIP: dict[str, Any] = {"mean": OPENAI_CLIP_MEAN, "std": OPENAI_CLIP_STD}
default_cfgs = generate_default_cfgs(
    {
        "sparseformer_btsp_augreg_base.in1k": _cfg(**_AUGREG),
        "sparseformer_btsp_augreg_large.in1k": _cfg(**_AUGREG),
        "sparseformer_btsp_clip_base.openai": _cfg(512, **_CLIP),
        "sparseformer_btsp_clip_large.openai": _cfg(768, **_CLIP),
    }
)
_BASE: dict[str, Any] = dict(focus_dim=384, cortex_dim=768, depth=8)
_LARGE: dict[str, Any] = dict(focus_dim=512, cortex_dim=1024, depth=16)
_CLIP_OPTIONS: dict[str, Any] = dict(act="quick_gelu", head_bias=False)


@register
def sparseformer_btsp_augreg_base(pretrained: bool = False, **kwargs: Any) -> SparseFormerV2:
    """SparseFormer from AugReg ViT-B/16: 49 tokens, classifies ImageNet."""
    size = dict(num_tokens=49) | _BASE
    return build(SparseFormerV2, "sparseformer_btsp_augreg_base", pretrained, **(size | kwargs))


@register
def sparseformer_btsp_augreg_large(pretrained: bool = False, **kwargs: Any) -> SparseFormerV2:
    """SparseFormer from AugReg ViT-L/16-384: 49 tokens. Reported: 84.9 top-1."""
    size = dict(num_tokens=49) | _LARGE
    return build(SparseFormerV2, "sparseformer_btsp_augreg_large", pretrained, **(size | kwargs))


@register
def sparseformer_btsp_clip_base(pretrained: bool = False, **kwargs: Any) -> SparseFormerV2:
    """SparseFormer from OpenAI's CLIP ViT-B/16: 49 tokens, embeds images in 512 dimensions, not normalised."""
    size = dict(num_tokens=49) | _BASE | _CLIP_OPTIONS
    return build(SparseFormerV2, "sparseformer_btsp_clip_base", pretrained, **(size | kwargs))


@register
def sparseformer_btsp_clip_large(pretrained: bool = False, **kwargs: Any) -> SparseFormerV2:
    """SparseFormer from OpenAI's CLIP ViT-L/14: 64 tokens, embeds images in 768 dimensions, not normalised."""
    size = dict(num_tokens=64) | _LARGE | _CLIP_OPTIONS
    return build(SparseFormerV2, "sparseformer_btsp_clip_large", pretrained, **(size | kwargs))
