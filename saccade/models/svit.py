"""SViT: vision transformer with super token sampling (arXiv 2211.11167).

group     tokens.super_tokens.SuperTokenizer      Eqs. 5-6
relate    layers.attention.SelfAttention          Eqs. 9-10
put back  tokens.super_tokens.spread              Eq. 11, with the association of the same block

Tokens are called super tokens in the paper. Where the paper is silent, this follows the authors' code, whose weights
give the same outputs here: GELU precedes BatchNorm in the stem; neighbours outside the map take part in the softmax of
the association, and their part of it is lost; features that the cell does not divide are padded with zeros after their
LayerNorm, and those zeros count; no gradient passes through the association (see `SuperTokenizer`); stages 3 and 4 of
Base and Large have layer scale. A cell of one pixel is plain self-attention.
"""

from collections.abc import Sequence
from typing import Any

from timm.layers import ClassifierHead, DropPath, LayerScale2d, calculate_drop_path_rates
from timm.models import checkpoint_seq, generate_default_cfgs
from torch import Tensor, nn

from saccade import ops
from saccade.layers.attention import SelfAttention
from saccade.layers.conv import DepthwiseConv
from saccade.layers.grid import to_features, to_pixels
from saccade.layers.linear import init_linear
from saccade.layers.mlp import ConvMlp
from saccade.layers.norm import ChannelNorm
from saccade.layers.position import AbsolutePosition, RelativePosition
from saccade.models.classifier import StagedClassifier
from saccade.models.registry import build, check_per_stage, choose, leaf, pretrained_cfg, register
from saccade.tokens.super_tokens import DenseSuperTokenizer, SuperTokenizer

__all__ = ["SViT"]


class ConvGeluNorm(nn.Module):
    """3x3 convolution, GELU, BatchNorm: one of the four steps of the stem."""

    def __init__(self, in_dim: int, dim: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, 3, stride=stride, padding=1)
        self.norm = nn.BatchNorm2d(dim)

    def forward(self, features: Tensor) -> Tensor:
        return ops.conv_norm_act(features, self.conv, self.norm, pre_act="gelu")  # norm(gelu(conv(x)))


class ConvNorm(nn.Module):
    """Convolution, BatchNorm and an activation: patch embedding, patch merging, and (with SiLU) the projection."""

    def __init__(self, in_dim: int, dim: int, kernel: int, stride: int, padding: int, act: str = ""):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, kernel, stride=stride, padding=padding)
        self.norm = nn.BatchNorm2d(dim)
        self.act = act

    def forward(self, features: Tensor) -> Tensor:
        return ops.conv_norm_act(features, self.conv, self.norm, act=self.act)  # act(norm(conv(x)))


class PixelAttention(nn.Module):
    """Attention for cells of one pixel: every pixel is its own super token (SViT Sec. 3.3)."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.attention = SelfAttention(dim, num_heads)

    def forward(self, features: Tensor, bias: Tensor | None = None) -> Tensor:
        """features (B, C, H, W), bias (heads, N, N) of the scores -> features (B, C, H, W)."""
        mixed = self.attention(to_pixels(features), bias)
        return to_features(mixed, features.shape[2], features.shape[3])


class SuperTokenAttention(nn.Module):
    """Super token attention: group, relate, put back (SViT Sec. 3.2)."""

    def __init__(self, dim: int, num_heads: int, tokenizer: SuperTokenizer | DenseSuperTokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.attention = SelfAttention(dim, num_heads)

    def forward(self, features: Tensor, bias: Tensor | None = None) -> Tensor:
        """features (B, C, H, W), bias (heads, M, M) of the scores -> features (B, C, H, W)."""
        tokens, association = self.tokenizer(features)[:2]  # group, SViT Eqs. 5-6
        rows, columns = tokens.shape[1], tokens.shape[2]
        # relate, SViT Eq. 9 and SViT Eq. 10: softmax(q(S) k(S)ᵀ / √d) v(S)
        tokens = self.attention(tokens.flatten(1, 2), bias).unflatten(1, (rows, columns))
        # put back, SViT Eq. 11
        return self.tokenizer.spread(tokens, association, features.shape[2], features.shape[3])


class RelativeBias(nn.Module):
    """The relative position bias of a grid of cells (the RPE row of SViT Table 6)."""

    def __init__(self, num_heads: int, cell: int, size: int):
        super().__init__()
        self.cell = cell
        side = -(-size // cell)
        self.relative = RelativePosition(num_heads, side, side)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> bias (heads, M, M)."""
        cell = self.cell
        return self.relative((features.shape[2] + cell - 1) // cell, (features.shape[3] + cell - 1) // cell)


class SViTBlock(nn.Module):
    """Position encoding, super token attention, convolutional feed-forward network (SViT Eqs. 1-3)."""

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        cpe: bool = True,
        bias: nn.Module | None = None,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.bias = bias
        self.position = DepthwiseConv(dim) if cpe else nn.Identity()
        self.norm1 = ChannelNorm(dim)
        self.attn = attn
        self.scale1 = LayerScale2d(dim, layer_scale) if layer_scale else nn.Identity()
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.BatchNorm2d(dim)
        self.mlp = mlp
        self.scale2 = LayerScale2d(dim, layer_scale) if layer_scale else nn.Identity()
        self.drop_path2 = DropPath(drop_path)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W)."""
        features = self.position(features)  # SViT Eq. 1: CPE(x) + x
        bias = None if self.bias is None else self.bias(features)
        update = self.attn(self.norm1(features), bias)
        features = features + self.drop_path1(self.scale1(update))  # SViT Eq. 2: STA(LN(x)) + x
        update = self.mlp(ops.norm_act(features, self.norm2))
        return features + self.drop_path2(self.scale2(update))  # SViT Eq. 3: ConvFFN(BN(x)) + x


@leaf
class SViTStage(nn.Module):
    """Patch merging, then blocks that share a cell size."""

    def __init__(self, merge: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.merge = merge
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) of the previous stage -> features (B, C', H', W')."""
        features = self.merge(features)
        return checkpoint_seq(self.blocks, features) if self.grad_checkpointing else self.blocks(features)


class SViT(StagedClassifier):
    """Four stages of super token blocks on a convolutional stem, with timm's model interface.

    Args:
        dims, depths, heads: width, number of blocks and attention heads per stage (SViT Table 8).
        super_token: side of a cell in pixels, per stage; 1 is plain attention.
        iterations: rounds of association and update; 0 keeps the cell means and upsamples them (SViT Table 7).
        stem: "conv" (four 3x3 convolutions) or "patch" (one 4x4 convolution of stride 4).
        position: "cpe" (depth-wise convolution in every block), "ape" (a table after the stem), "rpe" (a table of
            relative positions on the super token grid in every block) or "none".
        ffn: "conv" or "plain"; `ffn_shortcut` is the sum around its depth-wise convolution.
        projection: width of the 1x1 projection before pooling, 0 for none.
        layer_scale: initial value of the layer scale per stage, None for none.
        img_size: the size for which the tables of "ape" and "rpe" are built; they are interpolated to other sizes.
        association: "sparse" (nine tokens per pixel), "dense" (all tokens, SViT Eqs. 5-7) or "ssn" (all tokens, by
            the distances of SViT Eq. 4).
        mask_border, detach: see `SuperTokenizer`.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (3, 5, 9, 3),
        heads: Sequence[int] = (1, 2, 5, 8),
        super_token: Sequence[int] = (8, 4, 1, 1),
        iterations: int | Sequence[int] = 1,
        mlp_ratio: float = 4.0,
        stem: str = "conv",
        position: str = "cpe",
        ffn: str = "conv",
        ffn_shortcut: bool = True,
        projection: int = 1024,
        layer_scale: Sequence[float | None] = (None, None, None, None),
        association: str = "sparse",
        mask_border: bool = False,
        detach: bool = True,
        img_size: int = 224,
        drop_rate: float = 0.0,
        mlp_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__(in_chans, num_classes, dims[-1])
        choose("stem", stem, ("conv", "patch"))
        choose("position", position, ("cpe", "ape", "rpe", "none"))
        choose("ffn", ffn, ("conv", "plain"))
        choose("association", association, ("sparse", "dense", "ssn"))
        if association != "sparse" and mask_border:
            raise ValueError(f"mask_border is for association='sparse', got {association!r}. Leave it out.")
        rounds = [iterations] * len(dims) if isinstance(iterations, int) else list(iterations)
        check_per_stage(
            len(dims), depths=depths, heads=heads, super_token=super_token, iterations=rounds, layer_scale=layer_scale
        )
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.stem = conv_stem(in_chans, dims[0]) if stem == "conv" else ConvNorm(in_chans, dims[0], 4, 4, 0)
        side = -(-img_size // 4)
        self.position = AbsolutePosition(dims[0], side, side) if position == "ape" else nn.Identity()
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)  # a list per stage

        def attention(i: int) -> nn.Module:
            if super_token[i] == 1:
                return PixelAttention(dims[i], heads[i])
            if association == "sparse":
                tokenizer = SuperTokenizer(super_token[i], rounds[i], mask_border, detach)
            else:
                tokenizer = DenseSuperTokenizer(super_token[i], rounds[i], association == "ssn", detach)
            return SuperTokenAttention(dims[i], heads[i], tokenizer)

        def stage(i: int) -> SViTStage:
            dim = dims[i]
            blocks = [
                SViTBlock(
                    dim,
                    attention(i),
                    ConvMlp(dim, int(dim * mlp_ratio), conv=ffn == "conv", shortcut=ffn_shortcut, drop=mlp_drop_rate),
                    cpe=position == "cpe",
                    bias=RelativeBias(heads[i], super_token[i], -(-side // 2**i)) if position == "rpe" else None,
                    layer_scale=layer_scale[i],
                    drop_path=rate,
                )
                for rate in rates[i]
            ]
            return SViTStage(ConvNorm(dims[i - 1], dim, 3, 2, 1) if i else nn.Identity(), blocks)

        self.stages = nn.Sequential(*map(stage, range(len(dims))))
        self.head_hidden_size = projection or dims[-1]
        self.projection = ConvNorm(dims[-1], projection, 1, 1, 0, act="silu") if projection else nn.Identity()
        self.head = ClassifierHead(self.head_hidden_size, num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.apply(init_weights)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^stages\.(\d+)", (0,)), (r"^projection", (99999,))]
        return {"stem": r"^(?:stem|position)", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last chosen one, and with `prune_head` projection and classifier."""
        if prune_head:
            self.projection = nn.Identity()
        return super().prune_intermediate_layers(indices, prune_norm, prune_head)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(self.projection(features), pre_logits=pre_logits)


def conv_stem(in_chans: int, dim: int) -> nn.Sequential:
    """Four 3x3 convolutions to stride 4 (SViT Sec. 3.1)."""
    return nn.Sequential(
        ConvGeluNorm(in_chans, dim // 2, 2),
        ConvGeluNorm(dim // 2, dim // 2, 1),
        ConvGeluNorm(dim // 2, dim, 2),
        ConvGeluNorm(dim, dim, 1),
    )


def init_weights(module: nn.Module) -> None:
    """Linear layers truncated normal with zero bias; convolutions and norms keep PyTorch's defaults."""
    if isinstance(module, nn.Linear):
        init_linear(module)


default_cfgs = generate_default_cfgs(
    {
        **{f"svit_{size}.in1k": pretrained_cfg(first_conv="stem.0.conv") for size in ("small", "base", "large")},
        "svit_nano.untrained": pretrained_cfg(64, first_conv="stem.0.conv"),
    }
)


@register
def svit_small(pretrained: bool = False, **kwargs: Any) -> SViT:
    """SViT-S. Reported: 25M parameters, 4.4 GFLOPs, 83.6 top-1 at 224 px."""
    size = dict(dims=(64, 128, 320, 512), depths=(3, 5, 9, 3), heads=(1, 2, 5, 8), super_token=(8, 4, 1, 1))
    return build(SViT, "svit_small", pretrained, **(size | kwargs))


@register
def svit_base(pretrained: bool = False, **kwargs: Any) -> SViT:
    """SViT-B. Reported: 52M parameters, 9.9 GFLOPs, 84.8 top-1 at 224 px."""
    size = dict(dims=(96, 192, 384, 512), depths=(4, 6, 14, 6), heads=(2, 3, 6, 8), super_token=(8, 4, 1, 1))
    return build(SViT, "svit_base", pretrained, **(size | dict(layer_scale=(None, None, 1e-6, 1e-6)) | kwargs))


@register
def svit_large(pretrained: bool = False, **kwargs: Any) -> SViT:
    """SViT-L. Reported: 95M parameters, 15.6 GFLOPs, 85.3 top-1 at 224 px."""
    size = dict(dims=(96, 192, 448, 640), depths=(4, 7, 19, 8), heads=(2, 3, 7, 10), super_token=(8, 4, 1, 1))
    return build(SViT, "svit_large", pretrained, **(size | dict(layer_scale=(None, None, 1e-6, 1e-6)) | kwargs))


@register
def svit_nano(pretrained: bool = False, **kwargs: Any) -> SViT:
    """SViT for 64 to 128 px and CPUs; not in the paper. 4x4 and 2x2 cells leave 16 super tokens at 64 px."""
    size = dict(dims=(32, 64, 128, 192), depths=(1, 2, 5, 2), heads=(1, 2, 4, 6), super_token=(4, 2, 1, 1))
    return build(SViT, "svit_nano", pretrained, **(size | dict(projection=512) | kwargs))
