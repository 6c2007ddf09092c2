"""SViT: vision transformer with super token sampling, arXiv 2211.11167.

group     tokens.super_tokens.SuperTokenizer
relate    layers.attention.SelfAttention
put back  tokens.super_tokens.spread, by the association of the same block

Tokens are called super tokens in the paper. Where it is silent, the authors' code decides (their weights give their
outputs here): GELU comes before BatchNorm in the stem; neighbours outside the map stay in the softmax of the
association and their share is lost; a map that the cell does not divide is padded with zeros after its LayerNorm,
and those zeros count; no gradient passes through the association (see `SuperTokenizer`); layer scale stands in
stages 3 and 4 of Base and Large. A cell of one pixel is plain self-attention.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, DropPath, LayerScale2d, calculate_drop_path_rates, trunc_normal_
from timm.models import (
    checkpoint_seq,
    generate_default_cfgs,
    register_notrace_module,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from saccade.layers.attention import SelfAttention
from saccade.layers.batch_norm import fused_norm, learns_fused
from saccade.layers.depthwise import DepthwiseConv
from saccade.layers.forget import normed_into
from saccade.layers.grid import channels_last, check_images, to_features, to_pixels
from saccade.layers.mlp import ConvMlp
from saccade.layers.norm import ChannelNorm
from saccade.layers.position import AbsolutePosition, RelativePosition
from saccade.layers.residual import conv_act_norm, fits_inference
from saccade.layers.stem import ends_fixed, first_conv, first_conv_gelu_norm, starts
from saccade.models.registry import build, choose, one_a_stage, pretrained_cfg, register
from saccade.tokens.super_tokens import SuperTokenizer, spread

__all__ = ["SViT"]


class ConvGeluNorm(nn.Module):
    """A quarter of the stem: 3x3 convolution, GELU, and BatchNorm after it."""

    def __init__(self, in_dim: int, dim: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, 3, stride=stride, padding=1)
        self.norm = nn.BatchNorm2d(dim)

    def forward(self, features: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            if starts(self.conv, features):
                if ends_fixed(self.norm):
                    return first_conv_gelu_norm(self.conv, self.norm, features)
                features = first_conv(self.conv, features)
            elif fits_inference(features, (self.conv,), (self.norm,)):
                return conv_act_norm(self.conv, features, "gelu", self.norm)
            else:
                features = self.conv(features)
            if learns_fused(self.norm, features):
                return fused_norm(self.norm, features, gelu=True)
            return self.norm(F.gelu(features))
        return self.norm(F.gelu(self.conv(features)))


class ConvNorm(nn.Module):
    """Convolution and BatchNorm: patch embedding, patch merging, and (with its SiLU) the projection."""

    def __init__(self, in_dim: int, dim: int, kernel: int, stride: int, padding: int, act: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(in_dim, dim, kernel, stride=stride, padding=padding)
        self.norm = nn.BatchNorm2d(dim)
        self.act = act

    def forward(self, features: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if fits_inference(features, (self.conv,), (self.norm,)) and isinstance(self.norm, nn.Identity):
                return conv_act_norm(self.conv, features, "silu" if self.act else "")
        features = self.conv(features)
        if torch.jit.is_scripting():
            features = self.norm(features)
        else:
            features = fused_norm(self.norm, features) if learns_fused(self.norm, features) else self.norm(features)
        return F.silu(features) if self.act else features


class PixelAttention(nn.Module):
    """A cell of one pixel: every pixel is its own super token, and attention is the ordinary one (SVIT-13)."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.attention = SelfAttention(dim, num_heads)

    def forward(self, features: Tensor, bias: Tensor | None = None) -> Tensor:
        mixed = self.attention(to_pixels(features), bias)
        return to_features(mixed, features.shape[2], features.shape[3])


class SuperTokenAttention(nn.Module):
    """Attention among super tokens: group, relate, put back (SVIT-14 … SVIT-16)."""

    def __init__(self, dim: int, num_heads: int, tokenizer: SuperTokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.attention = SelfAttention(dim, num_heads)

    def forward(self, features: Tensor, bias: Tensor | None = None) -> Tensor:
        tokens, association = self.tokenizer(features)  # group
        rows, columns = tokens.shape[1], tokens.shape[2]
        tokens = self.attention(tokens.flatten(1, 2), bias).unflatten(1, (rows, columns))  # relate
        return spread(tokens, association, self.tokenizer.cell, features.shape[2], features.shape[3])  # put back


class RelativeBias(nn.Module):
    """The relative position bias of a map, counted in cells (SVIT-36)."""

    def __init__(self, num_heads: int, cell: int, size: int):
        super().__init__()
        self.cell = cell
        side = -(-size // cell)
        self.relative = RelativePosition(num_heads, side, side)

    def forward(self, features: Tensor) -> Tensor:
        cell = self.cell
        return self.relative((features.shape[2] + cell - 1) // cell, (features.shape[3] + cell - 1) // cell)


class SViTBlock(nn.Module):
    """Position, attention among super tokens, convolutional feed-forward (SVIT-19)."""

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
        features = self.position(features)
        bias = self.bias(features) if self.bias is not None else None
        if torch.jit.is_scripting():
            features = features + self.drop_path1(self.scale1(self.attn(self.norm1(features), bias)))
            return features + self.drop_path2(self.scale2(self.mlp(self.norm2(features))))
        else:
            features = features + self.drop_path1(self.scale1(normed_into(self.norm1, self.attn, features, bias)))
            return features + self.drop_path2(self.scale2(normed_into(self.norm2, self.mlp, features)))


@register_notrace_module
class SViTStage(nn.Module):
    """Patch merging, then blocks that share a cell size."""

    def __init__(self, merge: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.merge = merge
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) of the previous stage -> (B, C', H', W') of this one."""
        features = self.merge(features)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq(self.blocks, features)
        return self.blocks(features)


class SViT(nn.Module):
    """Four stages of super token blocks on a convolutional stem, in timm's contract.

    Args:
        dims, depths, heads: width, number of blocks and attention heads of the stages.
        super_token: side of a cell in pixels, per stage; 1 is plain attention.
        iterations: association and update, how often; 0 keeps the cell means and upsamples them (Table 7).
        stem: "conv" (four 3x3 convolutions) or "patch" (one 4x4 of stride 4).
        position: "cpe" (depth-wise convolution in every block), "ape" (a table after the stem), "rpe" (a table of
            relative positions on the super token grid in every block, which gives the printed 25.3M) or "none".
        ffn: "conv" or "plain"; `ffn_shortcut` is the sum around its depth-wise convolution.
        projection: width of the 1x1 projection before pooling, 0 for none.
        layer_scale: first value of the layer scale per stage, None for none.
        img_size: only for "ape" and "rpe": the size their tables are made for; other sizes interpolate.
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
        mask_border: bool = False,
        detach: bool = True,
        img_size: int = 224,
        drop_rate: float = 0.0,
        mlp_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        choose("stem", stem, ("conv", "patch"))
        choose("position", position, ("cpe", "ape", "rpe", "none"))
        choose("ffn", ffn, ("conv", "plain"))
        rounds = [iterations] * len(dims) if isinstance(iterations, int) else list(iterations)
        one_a_stage(
            len(dims), depths=depths, heads=heads, super_token=super_token, iterations=rounds, layer_scale=layer_scale
        )
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = dims[-1]
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.stem = conv_stem(in_chans, dims[0]) if stem == "conv" else ConvNorm(in_chans, dims[0], 4, 4, 0)
        side = -(-img_size // 4)
        self.position = AbsolutePosition(dims[0], side, side) if position == "ape" else nn.Identity()
        rates = calculate_drop_path_rates(drop_path_rate, depths, stagewise=True)
        stages = []
        for i, (dim, num_heads, cell) in enumerate(zip(dims, heads, super_token, strict=True)):

            def attend(dim: int = dim, num_heads: int = num_heads, cell: int = cell, rounds: int = rounds[i]):
                if cell == 1:
                    return PixelAttention(dim, num_heads)
                return SuperTokenAttention(dim, num_heads, SuperTokenizer(cell, rounds, mask_border, detach))

            blocks = [
                SViTBlock(
                    dim,
                    attend(),
                    ConvMlp(dim, int(dim * mlp_ratio), conv=ffn == "conv", shortcut=ffn_shortcut, drop=mlp_drop_rate),
                    cpe=position == "cpe",
                    bias=RelativeBias(num_heads, cell, -(-side // 2**i)) if position == "rpe" else None,
                    layer_scale=layer_scale[i],
                    drop_path=rate,
                )
                for rate in rates[i]
            ]
            merge = ConvNorm(dims[i - 1], dim, 3, 2, 1) if i else nn.Identity()
            stages.append(SViTStage(merge, blocks))
        self.stages = nn.Sequential(*stages)
        self.head_hidden_size = projection or dims[-1]
        self.projection = ConvNorm(dims[-1], projection, 1, 1, 0, act=True) if projection else nn.Identity()
        self.head = ClassifierHead(self.head_hidden_size, num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.apply(init_weights)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(".table")}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^stages\.(\d+)", (0,)), (r"^projection", (99999,))]
        return {"stem": r"^(?:stem|position)", "blocks": r"^stages\.(\d+)" if coarse else blocks}

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

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Images (B, 3, H, W) -> the maps of the chosen stages, strides 4, 8, 16, 32 (SVIT-33).

        `norm` has nothing to do: the stages of SViT end without a norm.
        """
        choose("output_fmt", output_fmt, ("NCHW",))
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        features = self.forward_stem(x)
        stages = self.stages[: last + 1] if stop_early and not torch.jit.is_scripting() else self.stages
        for i, stage in enumerate(stages):
            features = stage(features)
            if i in take:
                intermediates.append(features)
        return intermediates if intermediates_only else (features, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages behind the last chosen one, and with `prune_head` projection and classifier."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.projection = nn.Identity()
            self.reset_classifier(0, "")
        return take

    def forward_stem(self, images: Tensor) -> Tensor:
        check_images(images, self.in_chans)
        return self.position(self.stem(channels_last(images)))

    def forward_features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/32, W/32)."""
        return self.stages(self.forward_stem(images))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(self.projection(features), pre_logits=pre_logits)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> logits (B, K)."""
        return self.forward_head(self.forward_features(images))


def conv_stem(in_chans: int, dim: int) -> nn.Sequential:
    """Four 3x3 convolutions to stride 4 (SVIT-23)."""
    return nn.Sequential(
        ConvGeluNorm(in_chans, dim // 2, 2),
        ConvGeluNorm(dim // 2, dim // 2, 1),
        ConvGeluNorm(dim // 2, dim, 2),
        ConvGeluNorm(dim, dim, 1),
    )


def init_weights(module: nn.Module) -> None:
    """Linear layers truncated normal with zero bias; convolutions and norms as PyTorch makes them (SVIT-31)."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


default_cfgs = generate_default_cfgs(
    {
        "svit_small.in1k": pretrained_cfg(first_conv="stem.0.conv"),
        "svit_base.in1k": pretrained_cfg(first_conv="stem.0.conv"),
        "svit_large.in1k": pretrained_cfg(first_conv="stem.0.conv"),
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
