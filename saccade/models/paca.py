"""PaCa-ViT: vision transformer with patch-to-cluster attention (arXiv 2203.11987).

group     tokens.clusters.ClusterTokenizer       Eqs. 2-6; tokens.clusters.SharedTokenizer in blocks that share it
relate    layers.attention.CrossAttention        Eq. 1: every pixel attends to the tokens
put back  layers.attention.CrossAttention        the same step: its output is the update of the pixel

Tokens are called clusters in the paper. Where the paper is silent, this follows the authors' code, whose weights give
the same outputs here: the clustering reads the normalised pixels, as the queries do; a shared assignment groups every
block's own pixels, with gradient; the stem has nothing between its two convolutions; a LayerNorm ends every stage, and
the next stage, the heads and the detectors read its output. A stage of 0 clusters is plain self-attention.
"""

from collections.abc import Collection, Sequence
from typing import Any

from timm.layers import ClassifierHead, DropPath, LayerScale2d, calculate_drop_path_rates
from timm.models import checkpoint, generate_default_cfgs
from torch import Tensor, nn

from saccade import ops
from saccade.layers.attention import CrossAttention, SelfAttention
from saccade.layers.grid import to_features, to_pixels
from saccade.layers.linear import init_linear
from saccade.layers.mlp import ConvMlp
from saccade.layers.norm import ChannelNorm
from saccade.layers.position import AbsolutePosition
from saccade.models.classifier import StagedClassifier
from saccade.models.paca_teacher import ClusteringTeacher
from saccade.models.registry import build, check_per_stage, choose, leaf, pretrained_cfg, register
from saccade.ops.conv import conv
from saccade.tokens.clusters import (
    ClusterTokenizer,
    ConvClustering,
    LinearClustering,
    MlpClustering,
    PooledTokenizer,
    SharedTokenizer,
    StridedTokenizer,
    ToScore,
)

__all__ = ["PaCa"]

CLUSTERINGS = {"conv": ConvClustering, "mlp": MlpClustering, "linear": LinearClustering}
REDUCTIONS = ("stride", "pool")  # spatial reduction instead of clusters, for comparison (PaCa Fig. 2a)


class ConvStem(nn.Module):
    """Two 3x3 convolutions to stride 4 with nothing between them, then LayerNorm."""

    def __init__(self, in_chans: int, dim: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim // 2, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1)
        self.norm = ChannelNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/4, W/4)."""
        return self.norm(conv(conv(images, self.conv1), self.conv2))


class ConvMerge(nn.Module):
    """The transition to the next stage: 3x3 convolution of stride 2, LayerNorm."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, 3, stride=2, padding=1)
        self.norm = ChannelNorm(dim)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C', H/2, W/2)."""
        return self.norm(conv(features, self.conv))


class PaCaBlock(nn.Module):
    """Attention to the clusters, then the convolutional feed-forward network (PaCa Fig. 3).

    norm: "pre" normalises the input of each branch; "post" its output, inside the residual sum (as in Swin V2); "sub"
        the input and, once more, the input of the branch's last layer (the branch is built with it).
    """

    def __init__(
        self,
        dim: int,
        tokenizer: nn.Module | None,
        attn: nn.Module,
        mlp: nn.Module,
        norm: str = "pre",
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ):
        super().__init__()
        post = norm == "post"
        self.norm1 = nn.Identity() if post else ChannelNorm(dim)
        self.tokenizer = tokenizer
        self.attn = attn
        self.post_norm1 = ChannelNorm(dim) if post else nn.Identity()
        self.scale1 = LayerScale2d(dim, layer_scale) if layer_scale else nn.Identity()
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.Identity() if post else ChannelNorm(dim)
        self.mlp = mlp
        self.post_norm2 = ChannelNorm(dim) if post else nn.Identity()
        self.scale2 = LayerScale2d(dim, layer_scale) if layer_scale else nn.Identity()
        self.drop_path2 = DropPath(drop_path)

    def forward(self, features: Tensor, link: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """features (B, C, H, W), link (B, M, N) -> features (B, C, H, W), link (B, M, N).

        The link is what the previous block passes on: its assignment, or the scores of an external network.
        """
        update, link = self.attend(self.norm1(features), link)
        update = self.drop_path1(self.scale1(self.post_norm1(update)))
        features, normed = ops.add_norm(features, update, self.norm2)  # x + update, norm2(x + update)
        update = self.drop_path2(self.scale2(self.post_norm2(self.mlp(normed))))
        return ops.add(features, update), link

    def attend(self, normed: Tensor, link: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """normed features (B, C, H, W), link (B, M, N) -> the update of every pixel (B, C, H, W), link."""
        pixels = to_pixels(normed)
        if self.tokenizer is None:
            update = self.attn(pixels)
        else:
            tokens, link = self.tokenizer(normed, link)[:2]  # group
            update = self.attn(pixels, tokens)  # relate and put back, PaCa Eq. 1: softmax(Q Kᵀ / √C) V
        return to_features(update, normed.shape[2], normed.shape[3]), link


@leaf
class PaCaStage(nn.Module):
    """Transition, blocks that pass the assignment on, the teacher's features if there is one, and a LayerNorm."""

    def __init__(self, dim: int, merge: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.merge = merge
        self.blocks = nn.ModuleList(blocks)
        self.norm = ChannelNorm(dim)
        self.grad_checkpointing = False

    def forward(self, features: Tensor, scores: Tensor | None = None, added: Tensor | None = None) -> Tensor:
        """features (B, C, H, W) of the previous stage, scores (B, M, N) and features to add (B, C', H', W') of the
        teacher -> features (B, C', H', W')."""
        features, link = self.merge(features), scores
        for block in self.blocks:
            if self.grad_checkpointing:
                features, link = checkpoint(block, features, link)
            else:
                features, link = block(features, link)
        if added is not None:
            features = ops.add(features, added)
        return self.norm(features)


class PaCa(StagedClassifier):
    """Four stages of patch-to-cluster blocks on a convolutional stem, with timm's model interface.

    Args:
        dims, depths, heads: width, number of blocks and attention heads per stage.
        clusters: number of tokens per stage, independent of the image size; 0 is plain attention (PaCa Table 4).
        clustering: "conv" (7x7 neighbourhood), "mlp" (the pixel alone) or "linear"; or spatial reduction in every
            block: "stride" (convolutions of stride 8, 4, 2, so that tokens grow with the image) or "pool" (average
            pooling to the square nearest to `clusters`).
        clustering_scope: which blocks compute an assignment: "stage" (the first block, shared by the others), "block"
            (every block), or every k-th block. `where` is another name for it.
        teacher: depths of the external clustering network, which then computes all assignments instead of
            `clustering`; or a network of your own, see `paca_teacher`.
        norm: "pre", "post" or "sub", see `PaCaBlock`.
        layer_scale: initial value of the layer scale, None for none.
        position: "none", or "ape": a learned vector per position, added after the stem.
        img_size: the size for which the table of "ape" is built; it is interpolated to other sizes.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dims: Sequence[int] = (96, 192, 320, 384),
        depths: Sequence[int] = (3, 3, 10, 3),
        heads: Sequence[int] = (2, 4, 8, 16),
        clusters: Sequence[int] = (100, 100, 100, 0),
        clustering: str = "conv",
        clustering_scope: str | int | None = None,
        teacher: Sequence[int] | nn.Module | None = None,
        mlp_ratio: float = 4.0,
        norm: str = "pre",
        layer_scale: float | None = None,
        position: str = "none",
        img_size: int = 224,
        drop_rate: float = 0.0,
        mlp_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        where: str | int | None = None,
    ):
        super().__init__(in_chans, num_classes, dims[-1])
        check_per_stage(len(dims), depths=depths, heads=heads, clusters=clusters)
        if min(clusters) < 0:
            raise ValueError(f"clusters must be {len(dims)} numbers from 0 (plain attention) up; got {clusters!r}.")
        choose("clustering", clustering, (*CLUSTERINGS, *REDUCTIONS))
        choose("norm", norm, ("pre", "post", "sub"))
        choose("position", position, ("none", "ape"))
        period = clustering_period(clustering_scope, where)
        if teacher is not None and period:
            raise ValueError("a teacher computes one assignment per stage. Leave clustering_scope at 'stage'.")
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.stem = ConvStem(in_chans, dims[0])
        side = -(-img_size // 4)
        self.position = AbsolutePosition(dims[0], side, side) if position == "ape" else nn.Identity()
        self.teacher: nn.Module | None = (
            ClusteringTeacher(dims, teacher, clusters) if isinstance(teacher, Sequence) else teacher
        )
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)  # a list per stage

        def stage(i: int) -> PaCaStage:
            dim, sub = dims[i], norm == "sub"
            attention = CrossAttention if clusters[i] else SelfAttention
            blocks = [
                PaCaBlock(
                    dim,
                    tokenizer(i, shared=bool(k % period if period else k)),
                    attention(dim, heads[i], sub),
                    ConvMlp(dim, int(dim * mlp_ratio), act_first=False, drop=mlp_drop_rate, sub_norm=sub),
                    norm=norm,
                    layer_scale=layer_scale,
                    drop_path=rate,
                )
                for k, rate in enumerate(rates[i])
            ]
            return PaCaStage(dim, ConvMerge(dims[i - 1], dim) if i else nn.Identity(), blocks)

        def tokenizer(i: int, shared: bool) -> nn.Module | None:
            """Of a block: none, spatial reduction, one that shares an assignment, or one that computes it."""
            if clusters[i] == 0:
                return None
            if teacher is None and clustering == "stride":
                return StridedTokenizer(dims[i], 2 ** max(0, len(dims) - 1 - i))
            if teacher is None and clustering == "pool":
                return PooledTokenizer(dims[i], round(clusters[i] ** 0.5))
            if shared:
                return SharedTokenizer(dims[i])
            return ClusterTokenizer(dims[i], CLUSTERINGS[clustering](dims[i], clusters[i]) if teacher is None else None)

        self.stages = nn.ModuleList(map(stage, range(len(dims))))
        self.head = ClassifierHead(dims[-1], num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.apply(init_weights)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = [
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^stages\.(\d+)\.merge", (0,)),
            (r"^stages\.(\d+)", (99,)),
        ]
        return {"stem": r"^(?:stem|position|teacher)", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weights to load, and why others keep their initial values: layers that score another number of clusters
        (PaCa Sec. 3.2.4)."""
        adapted, new = dict(state_dict), {}
        for name, module in self.named_modules():
            if not isinstance(module, ToScore):
                continue
            weight = state_dict.get(f"{name}.weight")
            if module.bias is None:  # a constant over the pixels, which their softmax ignores
                adapted.pop(f"{name}.bias", None)
            if weight is None or weight.shape[0] == module.out_features:
                continue
            for parameter, _ in module.named_parameters():
                adapted.pop(f"{name}.{parameter}", None)
                new[f"{name}.{parameter}"] = f"{module.out_features} clusters here, {weight.shape[0]} in the checkpoint"
        return adapted, new

    @ops.model_pass
    def forward_stages(self, images: Tensor, count: int, take: Collection[int]) -> tuple[Tensor, list[Tensor]]:
        """Features after the norm that ends every stage.

        A pruned model's teacher keeps all its stages: the assignments of fine stages come from its coarsest features.
        """
        features, intermediates = self.forward_stem(images), []
        nothing: list[Tensor | None] = [None] * len(self.stages)
        scores, added = (nothing, nothing) if self.teacher is None else self.teacher(features)  # per stage
        for i, stage in zip(range(count), self.stages, strict=False):
            features = stage(features, scores[i], added[i])
            if i in take:
                intermediates.append(features)
        return features, intermediates


def clustering_period(clustering_scope: str | int | None, where: str | int | None) -> int:
    """The number of blocks that share an assignment; 0 means all blocks of the stage."""
    if clustering_scope is not None and where is not None:
        raise ValueError(f"got clustering_scope={clustering_scope!r} and where={where!r}. Pass clustering_scope alone.")
    scope = where if clustering_scope is None else clustering_scope
    if isinstance(scope, int) and scope > 0:
        return scope
    if scope not in (None, "stage", "block"):
        raise ValueError(f"clustering_scope must be 'stage', 'block' or a number of blocks from 1 up; got {scope!r}.")
    return 1 if scope == "block" else 0


def init_weights(module: nn.Module) -> None:
    """Linear layers normal, convolutions normal by fan-out, biases zero, as in the authors' code.

    Linear layers that the authors write as 1x1 convolutions are initialised as convolutions.
    """
    if isinstance(module, nn.Linear):
        init_linear(module)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, (ConvClustering, ClusteringTeacher)):  # after their layers: `apply` ends with the parent
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=(2 / layer.out_features) ** 0.5)


_TRAINED = ("tiny", "small", "base", "mlp_small", "ec_small", "ec_base")
default_cfgs = generate_default_cfgs(
    {
        **{f"paca_{name}.in1k": pretrained_cfg(first_conv="stem.conv1") for name in _TRAINED},
        "paca_ec_tiny.untrained": pretrained_cfg(first_conv="stem.conv1"),
        "paca_nano.untrained": pretrained_cfg(64, first_conv="stem.conv1"),
    }
)


@register
def paca_tiny(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa-Tiny. Reported: 12.2M parameters, 3.2 GFLOPs, 80.9 top-1 at 224 px."""
    size = dict(dims=(96, 192, 320, 384), depths=(2, 2, 4, 2), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 0))
    return build(PaCa, "paca_tiny", pretrained, **(size | kwargs))


@register
def paca_small(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa-Small. Reported: 22.0M parameters, 5.5 GFLOPs, 83.08 top-1 at 224 px."""
    size = dict(dims=(96, 192, 320, 384), depths=(3, 3, 10, 3), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 0))
    return build(PaCa, "paca_small", pretrained, **(size | kwargs))


@register
def paca_base(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa-Base. Reported: 46.9M parameters, 9.5 GFLOPs, 83.96 top-1 at 224 px."""
    size = dict(dims=(96, 192, 384, 512), depths=(3, 3, 18, 3), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 0))
    return build(PaCa, "paca_base", pretrained, **(size | kwargs))


@register
def paca_mlp_small(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa-Small, clustering by MLP. Reported: 22.6M parameters, 5.9 GFLOPs, 83.13 top-1 at 224 px."""
    size = dict(dims=(96, 192, 320, 384), depths=(3, 3, 10, 3), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 0))
    return build(PaCa, "paca_mlp_small", pretrained, **(size | dict(clustering="mlp") | kwargs))


@register
def paca_ec_tiny(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa-Tiny with external clustering; only in the authors' code: 12.48M parameters, 3.38 GFLOPs."""
    size = dict(dims=(96, 192, 320, 384), depths=(2, 2, 2, 2), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 100))
    return build(PaCa, "paca_ec_tiny", pretrained, **(size | dict(teacher=(2, 2, 2, 2)) | kwargs))


@register
def paca_ec_small(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa-Small, external clustering. Reported: 21.1M parameters, 5.4 GFLOPs, 83.17 top-1 at 224 px."""
    size = dict(dims=(96, 192, 320, 384), depths=(3, 3, 7, 3), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 100))
    return build(PaCa, "paca_ec_small", pretrained, **(size | dict(teacher=(2, 2, 2, 2)) | kwargs))


@register
def paca_ec_base(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa-Base, external clustering. Reported: 47.65M parameters, 9.7 GFLOPs, 84.22 top-1 at 224 px."""
    size = dict(dims=(96, 192, 384, 512), depths=(3, 3, 16, 3), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 100))
    return build(PaCa, "paca_ec_base", pretrained, **(size | dict(teacher=(2, 2, 4, 2)) | kwargs))


@register
def paca_nano(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa for 64 to 128 px and CPUs; not in the paper. Few clusters: stage 3 has 16 pixels at 64 px."""
    size = dict(dims=(32, 64, 128, 192), depths=(1, 2, 5, 2), heads=(1, 2, 4, 6), clusters=(32, 32, 16, 0))
    return build(PaCa, "paca_nano", pretrained, **(size | kwargs))
