"""PaCa-ViT: vision transformer with patch-to-cluster attention, arXiv 2203.11987.

group     tokens.clusters.ClusterTokenizer, and tokens.clusters.SharedTokenizer in the blocks that reuse its assignment
relate    layers.attention.CrossAttention: every pixel asks the tokens
put back  layers.attention.CrossAttention, the same step: what a pixel hears is its own update

Tokens are called clusters in the paper. Where it is silent, the authors' code decides (their weights give their
outputs here): the clustering reads the normalised pixels, from which queries come too; a shared assignment groups
every block's own pixels, with gradient; the stem has nothing between its two convolutions; a LayerNorm ends every
stage, and the next stage, the heads and the detectors start from there. A stage of 0 clusters is plain attention.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, DropPath, LayerScale2d, calculate_drop_path_rates, trunc_normal_
from timm.models import (
    checkpoint,
    generate_default_cfgs,
    register_notrace_module,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from saccade.layers.attention import CrossAttention, SelfAttention
from saccade.layers.batch_norm import heard
from saccade.layers.forget import normed_into
from saccade.layers.grid import channels_last, check_images, to_features, to_pixels
from saccade.layers.mlp import ConvMlp
from saccade.layers.norm import ChannelNorm, add_norm, fits_map
from saccade.layers.position import AbsolutePosition
from saccade.layers.residual import conv_norm
from saccade.layers.stem import first_conv
from saccade.models.paca_teacher import ClusteringTeacher
from saccade.models.registry import build, choose, one_a_stage, pretrained_cfg, register
from saccade.tokens.clusters import (
    ClusterTokenizer,
    ConvClustering,
    LinearClustering,
    MlpClustering,
    SharedTokenizer,
    ToScore,
)

__all__ = ["PaCa"]

CLUSTERINGS = {"conv": ConvClustering, "mlp": MlpClustering, "linear": LinearClustering}


class ConvStem(nn.Module):
    """Two 3x3 convolutions to stride 4 with nothing between them, and LayerNorm (PACA-27)."""

    def __init__(self, in_chans: int, dim: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim // 2, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1)
        self.norm = ChannelNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self.norm(self.conv2(self.conv1(images)))
        else:
            return conv_norm(self.conv2, self.norm, first_conv(self.conv1, images))


class ConvMerge(nn.Module):
    """The transition to the next stage: half the side, another width (PACA-28)."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, 3, stride=2, padding=1)
        self.norm = ChannelNorm(dim)

    def forward(self, features: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self.norm(self.conv(features))
        else:
            return conv_norm(self.conv, self.norm, features)


class PaCaBlock(nn.Module):
    """Attention to the clusters, then the convolutional feed-forward (PACA-29).

    `norm` says where the norms stand: "pre" in front of each branch, "post" behind it, inside the residual sum
    (as in Swin V2), "sub" in front and once more before each branch's last layer (the branch is built with it).
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

        The link is what the block before hands over: its assignment, or the scores of an external network.
        """
        if torch.jit.is_scripting():
            mixed, link = self.attend(self.norm1(features), link)
        else:
            mixed, link = normed_into(self.norm1, self.attend, features, link)
        mixed = to_features(mixed, features.shape[2], features.shape[3])
        features = features + self.drop_path1(self.scale1(self.post_norm1(mixed)))
        if torch.jit.is_scripting():
            mixed = self.mlp(self.norm2(features))
        else:
            mixed = normed_into(self.norm2, self.mlp, features)
        return features + self.drop_path2(self.scale2(self.post_norm2(mixed))), link

    @torch.jit.ignore
    def over_pixels(
        self, pixels: Tensor, more: Tensor | None, link: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """pixels (B, H, W, C), what is still to be added to them, link -> the same, for the next block.

        Every sum stands right before the norm that reads it.
        """
        pixels, normed = add_norm(pixels, more, self.norm1)
        mixed, link = self.attend(normed.permute(0, 3, 1, 2), link)
        mixed = to_features(mixed, pixels.shape[1], pixels.shape[2])
        mixed = self.drop_path1(self.scale1(self.post_norm1(mixed)))
        pixels, normed = add_norm(pixels, mixed.permute(0, 2, 3, 1), self.norm2)
        mixed = self.mlp(normed.permute(0, 3, 1, 2))
        return pixels, self.drop_path2(self.scale2(self.post_norm2(mixed))).permute(0, 2, 3, 1), link

    def attend(self, normed: Tensor, link: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """normed features (B, C, H, W), link -> what every pixel found (B, N, C), link."""
        if self.tokenizer is not None:
            tokens, link = self.tokenizer(normed, link)[:2]  # group
            return self.attn(to_pixels(normed), tokens), link  # relate, and put back
        return self.attn(to_pixels(normed)), link


@register_notrace_module
class PaCaStage(nn.Module):
    """Transition, blocks that hand the assignment on, the teacher's map where there is one, and a norm."""

    def __init__(self, dim: int, merge: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.merge = merge
        self.blocks = nn.ModuleList(blocks)
        self.norm = ChannelNorm(dim)
        self.grad_checkpointing = False

    def forward(self, features: Tensor, scores: Tensor | None = None, added: Tensor | None = None) -> Tensor:
        """features (B, C, H, W) of the previous stage -> (B, C', H', W') of this one."""
        features = self.merge(features)
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if self.goes_over_pixels(features):
                return self.over_pixels(features, scores, added)
        link = scores
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                features, link = checkpoint(block, features, link)
            else:
                features, link = block(features, link)
        if added is not None:
            features = features + added
        return self.norm(features)

    @torch.jit.ignore
    def goes_over_pixels(self, features: Tensor) -> bool:
        """Whether sums are left to the norms behind them: for compilers, and for inference by kernels; not where
        somebody listens to a block.
        """
        if self.grad_checkpointing or heard(self.blocks) or any(type(block) is not PaCaBlock for block in self.blocks):
            return False
        return torch.compiler.is_compiling() or (not torch.is_grad_enabled() and fits_map(features))

    @torch.jit.ignore
    def over_pixels(self, features: Tensor, link: Tensor | None, added: Tensor | None) -> Tensor:
        """The same in the order of memory. Compilers would write a sum of maps (B, C, H, W) in the order of its axes,
        ten times as slowly, or compute it again for everybody who reads it.
        """
        pixels, more = features.permute(0, 2, 3, 1), None
        for block in self.blocks:
            pixels, more, link = block.over_pixels(pixels, more, link)
        if added is not None:
            more = added.permute(0, 2, 3, 1) if more is None else more + added.permute(0, 2, 3, 1)
        return add_norm(pixels, more, self.norm)[1].permute(0, 3, 1, 2)


class PaCa(nn.Module):
    """Four stages of patch-to-cluster blocks on a convolutional stem, in timm's contract.

    Args:
        dims, depths, heads: width, number of blocks and attention heads of the stages.
        clusters: number of clusters per stage, whatever the image; 0 is plain attention (Table 4).
        clustering: "conv" (7x7 neighbourhood), "mlp" (the pixel alone) or "linear".
        where: who computes the assignment: "stage" (the first block, for all), "block" (each its own), or every
            k-th block.
        teacher: depths of the external clustering network, which then computes all assignments and leaves
            `clustering` nothing to do; or a network of your own in its place, see `paca_teacher`.
        norm: "pre", "post" or "sub", see `PaCaBlock`.
        layer_scale: first value of the layer scale, None for none.
        position: "none", or "ape": a learned vector a place, added after the stem.
        img_size: only for "ape": the size its table is made for; other sizes interpolate.
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
        where: str | int = "stage",
        teacher: Sequence[int] | nn.Module | None = None,
        mlp_ratio: float = 4.0,
        norm: str = "pre",
        layer_scale: float | None = None,
        position: str = "none",
        img_size: int = 224,
        drop_rate: float = 0.0,
        mlp_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        one_a_stage(len(dims), depths=depths, heads=heads)
        check_clusters(clusters, len(dims))
        choose("clustering", clustering, tuple(CLUSTERINGS))
        choose("norm", norm, ("pre", "post", "sub"))
        choose("position", position, ("none", "ape"))
        period = every(where)
        if teacher is not None and where != "stage":
            raise ValueError(f"a teacher makes one assignment a stage: leave where='stage', got {where!r}.")
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = dims[-1]
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.stem = ConvStem(in_chans, dims[0])
        side = -(-img_size // 4)
        self.position = AbsolutePosition(dims[0], side, side) if position == "ape" else nn.Identity()
        self.teacher: nn.Module | None = (
            ClusteringTeacher(dims, teacher, clusters) if isinstance(teacher, Sequence) else teacher
        )

        def tokenizer(dim: int, num_tokens: int, index: int) -> nn.Module | None:
            if num_tokens == 0:
                return None
            if index % period if period else index:
                return SharedTokenizer(dim)
            return ClusterTokenizer(dim, CLUSTERINGS[clustering](dim, num_tokens) if teacher is None else None)

        rates = calculate_drop_path_rates(drop_path_rate, depths, stagewise=True)
        sub = norm == "sub"
        stages = []
        for i, (dim, num_heads, num_tokens) in enumerate(zip(dims, heads, clusters, strict=True)):
            blocks = [
                PaCaBlock(
                    dim,
                    tokenizer(dim, num_tokens, j),
                    CrossAttention(dim, num_heads, sub) if num_tokens else SelfAttention(dim, num_heads, sub),
                    ConvMlp(dim, int(dim * mlp_ratio), act_first=False, drop=mlp_drop_rate, sub_norm=sub),
                    norm=norm,
                    layer_scale=layer_scale,
                    drop_path=rate,
                )
                for j, rate in enumerate(rates[i])
            ]
            stages.append(PaCaStage(dim, ConvMerge(dims[i - 1], dim) if i else nn.Identity(), blocks))
        self.stages = nn.ModuleList(stages)
        self.head = ClassifierHead(dims[-1], num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.apply(init_weights)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(".table")}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = [
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^stages\.(\d+)\.merge", (0,)),
            (r"^stages\.(\d+)", (99,)),
        ]
        return {"stem": r"^(?:stem|position|teacher)", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Another number of clusters: only the layers that score them stay new (section 3.2.4, PACA-39)."""
        kept, new = dict(state_dict), {}
        for name, module in self.named_modules():
            if not isinstance(module, ToScore):
                continue
            theirs = state_dict.get(f"{name}.weight")
            if theirs is None or theirs.shape[0] == module.out_features:
                continue
            for parameter, _ in module.named_parameters():
                kept.pop(f"{name}.{parameter}", None)
                new[f"{name}.{parameter}"] = f"{module.out_features} clusters here, {theirs.shape[0]} in the checkpoint"
        return kept, new

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Images (B, 3, H, W) -> the maps of the chosen stages, strides 4, 8, 16, 32, after their norms (PACA-31).

        `norm` has nothing to do: every stage of PaCa ends with one.
        """
        choose("output_fmt", output_fmt, ("NCHW",))
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        features = self.forward_stem(x)
        scores, added = self.ask_teacher(features)
        stages = self.stages[: last + 1] if stop_early and not torch.jit.is_scripting() else self.stages
        for i, stage in enumerate(stages):
            features = stage(features, scores[i], added[i])
            if i in take:
                intermediates.append(features)
        return intermediates if intermediates_only else (features, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages behind the last chosen one, and with `prune_head` the classifier.

        A teacher stays whole: the assignments of the stages that remain come down from its coarsest map.
        """
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_stem(self, images: Tensor) -> Tensor:
        check_images(images, self.in_chans)
        return self.position(self.stem(channels_last(images)))

    def ask_teacher(self, features: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """features (B, C, H, W) of the stem -> for every stage its scores (B, M, N) and the map to add, or None."""
        if self.teacher is not None:
            return self.teacher(features)
        nothing: list[Tensor | None] = [None for _ in self.stages]
        return nothing, nothing

    def forward_features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/32, W/32)."""
        features = self.forward_stem(images)
        scores, added = self.ask_teacher(features)
        for i, stage in enumerate(self.stages):
            features = stage(features, scores[i], added[i])
        return features

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(features, pre_logits=pre_logits)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> logits (B, K)."""
        return self.forward_head(self.forward_features(images))


def check_clusters(clusters: Sequence[int], stages: int) -> None:
    if not isinstance(clusters, Sequence) or len(clusters) != stages or any(number < 0 for number in clusters):
        raise ValueError(f"clusters must be {stages} numbers, one a stage, 0 for plain attention; got {clusters!r}.")


def every(where: str | int) -> int:
    """The number of blocks that share an assignment; 0 means the whole stage."""
    if isinstance(where, int) and where > 0:
        return where
    if where not in ("stage", "block"):
        raise ValueError(f"where must be 'stage', 'block' or a number of blocks from 1 up; got {where!r}.")
    return 0 if where == "stage" else 1


def init_weights(module: nn.Module) -> None:
    """Linear layers truncated normal, convolutions normal by fan-out, biases zero (PACA-33).

    What the authors write as 1x1 convolutions are linear layers here, and keep a convolution's start.
    """
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
    elif isinstance(module, (ConvClustering, ClusteringTeacher)):  # after their layers: `apply` ends with the parent
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=(2 / layer.out_features) ** 0.5)
    if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
        nn.init.zeros_(module.bias)


default_cfgs = generate_default_cfgs(
    {
        "paca_tiny.in1k": pretrained_cfg(first_conv="stem.conv1"),
        "paca_small.in1k": pretrained_cfg(first_conv="stem.conv1"),
        "paca_base.in1k": pretrained_cfg(first_conv="stem.conv1"),
        "paca_mlp_small.in1k": pretrained_cfg(first_conv="stem.conv1"),
        "paca_ec_tiny.untrained": pretrained_cfg(first_conv="stem.conv1"),
        "paca_ec_small.in1k": pretrained_cfg(first_conv="stem.conv1"),
        "paca_ec_base.in1k": pretrained_cfg(first_conv="stem.conv1"),
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
    """PaCa-Small, clusters by perceptron. Reported: 22.6M parameters, 5.9 GFLOPs, 83.13 top-1 at 224 px."""
    size = dict(dims=(96, 192, 320, 384), depths=(3, 3, 10, 3), heads=(2, 4, 8, 16), clusters=(100, 100, 100, 0))
    return build(PaCa, "paca_mlp_small", pretrained, **(size | dict(clustering="mlp") | kwargs))


@register
def paca_ec_tiny(pretrained: bool = False, **kwargs: Any) -> PaCa:
    """PaCa-Tiny with the external clustering network; in the authors' code only: 12.48M parameters, 3.38 GFLOPs."""
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
