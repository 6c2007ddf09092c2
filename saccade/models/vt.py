"""VT: visual transformers, a ResNet whose last stage works on a few tokens, arXiv 2006.03677.

group     tokens.visual_tokens.FilterTokenizer, then tokens.visual_tokens.RecurrentTokenizer
relate    layers.relation.VisualTokenTransformer
put back  tokens.projector.TokenProjector

There is no authors' code for the classifiers. The paper's equations leave widths, heads, norms and scales open; what
stands here is the reading that reproduces its printed costs (docs/vt.md has every row of its tables beside ours).

What keeps training stable: the equations have no scale and no norm. Here scores are divided by the root of their
width, every matrix is followed by batch norm, so tokens keep the size of the ResNet's own features, and the gain of
the last norm of every residual branch (attention, feed-forward, projector) starts at zero: a fresh VT stage hands
its tokens and its map on unchanged, and each branch grows only as far as it helps. `relation="equations"` is the
letter of Eq. 3 and 4.

What timm's contract means here. The classifier reads tokens, pixel tasks read the map (VT-27), so
  forward_features   gives the last tokens as timm's map, one token a row: (B, token_dim, M, 1);
  forward_head       pools them (the paper: their mean) and classifies; global_pool="" leaves them as they are;
  forward_tokens     gives the same as (B, M, token_dim);
  features_only, forward_intermediates  give the maps: ResNet stages at strides 4, 8, 16, then the projected map.
The classifier's last module has no projector: nothing reads its map (VTR-08). `features_only=True` adds one
(`project_last`), so that the last map carries the last tokens; it starts as the identity, so a classifier's weights
give the same maps in both, and loading says that it stays new.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead
from timm.models import (
    checkpoint,
    checkpoint_seq,
    generate_default_cfgs,
    register_notrace_function,
    register_notrace_module,
)
from timm.models._features import feature_take_indices
from timm.models.resnet import ResNet
from torch import Tensor, nn

from saccade.layers.batch_norm import norm_relu
from saccade.layers.grid import channels_last, check_images
from saccade.layers.relation import EquationTransformer, FeedForward, GraphConvolution, VisualTokenTransformer
from saccade.layers.residual import (
    conv_norm_relu,
    conv_norm_relu_pool,
    fits_inference,
    fits_training,
    is_usual_pool,
    learns_compiled,
    pool_features,
    stem_conv,
)
from saccade.models.registry import build, choose, pretrained_cfg, register
from saccade.models.resnet import LeanBasicBlock, LeanBottleneck
from saccade.tokens.projector import TokenProjector
from saccade.tokens.visual_tokens import TOKENIZERS, KeepTokenizer, RecurrentTokenizer, RepeatedTokenizer, pixel_groups

__all__ = ["VT"]
register_notrace_function(check_images)
register_notrace_function(channels_last)

BLOCKS = {"basic": LeanBasicBlock, "bottleneck": LeanBottleneck}
RELATIONS = ("transformer", "equations", "graph", "none", "skip")


class VTBlock(nn.Module):
    """One VT module: group, relate, put back (VT-25); no projector leaves the map as it is."""

    def __init__(self, tokenizer: nn.Module, relation: nn.Module, projector: nn.Module | None):
        super().__init__()
        self.tokenizer = tokenizer
        self.relation = relation
        self.projector = projector

    def forward(self, features: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W), previous tokens (B, M, D) -> features (B, C', H, W), tokens (B, M', D)."""
        tokens = self.tokenizer(features, previous)[0]  # group
        tokens = self.relation(tokens)  # relate
        if self.projector is not None:
            features = self.projector(features, tokens)  # put back
        return features, tokens


@register_notrace_module
class VTStage(nn.Module):
    """VT modules in place of a ResNet's last stage."""

    def __init__(self, pool: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.pool = pool
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> features (B, C', H, W), tokens (B, M, D)."""
        features = self.pool(features)
        tokens: Tensor | None = None  # the first module has none to look at
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                features, tokens = checkpoint(block, features, tokens)
            else:
                features, tokens = block(features, tokens)
        assert tokens is not None  # there is at least one module
        return features, tokens


class VT(nn.Module):
    """A ResNet's stem and first three stages, then VT modules, in timm's contract and with timm's names.

    Args:
        block, layers, widths: of the ResNet stages: "basic" or "bottleneck", number of blocks, width of the blocks.
        stem: "resnet" (7x7 convolution and max pooling, stride 4) or "small" (three 3x3 convolutions, stride 2).
        depth: number of VT modules.
        dim, token_dim: channels of the VT modules' map, and of the tokens.
        num_tokens: tokens that a tokenizer makes; 16, 32 and 64 in Table 6.
        num_heads: of all attention, on pixels and on tokens.
        tokenizer: of the first module: "filter", "clustering" or "pooling" (Table 3), or your own in `TOKENIZERS`.
        recurrence: of the others (Table 4): "half" of the tokens ask for new ones and are replaced, "full" all are,
            "none" makes tokens as the first module does, beside half of the previous ones.
        relation: "transformer", "graph" or "none" (Table 5; "none" keeps the map of each token by itself),
            "equations" (Eq. 3 and 4 by the letter), "skip" (nothing); one word, or one for each module.
        key_groups, value_groups: groups of channels in the transformer's queries and keys, and in its values.
        first_value: whether the first module's filters average a grouped linear map of the pixels, as later ones do.
        projector: whether tokens are put back on the map (Table 7). Without, later modules only relate.
        project_last: whether the last module has a projector too. A classifier does not read its map.
        pool: whether the map is max-pooled by 2 before the VT modules.
        norm: whether the VT modules have batch norm.
        iterations: of the k-means of the clustering tokenizer.
        drop_rate, drop_path_rate: dropout before the classifier, stochastic depth in ResNet blocks and VT modules.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        block: str = "basic",
        layers: Sequence[int] = (2, 2, 2),
        widths: Sequence[int] = (64, 128, 256),
        stem: str = "resnet",
        depth: int = 2,
        dim: int = 512,
        token_dim: int = 1024,
        num_tokens: int = 16,
        num_heads: int = 16,
        tokenizer: str = "filter",
        recurrence: str = "half",
        relation: str | Sequence[str] = "transformer",
        key_groups: int = 2,
        value_groups: int = 1,
        first_value: bool = False,
        projector: bool = True,
        project_last: bool = False,
        pool: bool = False,
        norm: bool = True,
        iterations: int = 10,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        choose("block", block, tuple(BLOCKS))
        choose("stem", stem, ("resnet", "small"))
        choose("tokenizer", tokenizer, tuple(TOKENIZERS))
        choose("recurrence", recurrence, ("half", "full", "none"))
        relations = [relation] * depth if isinstance(relation, str) else list(relation)
        for word in relations:
            choose("relation", word, RELATIONS)
        if len(relations) != depth:
            raise ValueError(f"relation must be one word or one for each of {depth} modules; got {relations}.")
        if recurrence == "half" and num_tokens < 2:
            raise ValueError('half of one token cannot ask; use num_tokens >= 2, or recurrence="full".')
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = token_dim
        self.grad_checkpointing = False

        share = (sum(layers) - 1) / (sum(layers) + depth - 1)  # the rates go on rising through the VT modules
        trunk = ResNet(
            BLOCKS[block],
            tuple(layers),
            num_classes=0,
            in_chans=in_chans,
            stem_type="deep" if stem == "small" else "",
            stem_width=widths[0] // 2 if stem == "small" else 64,
            channels=tuple(widths),
            drop_path_rate=drop_path_rate * share,
        )
        self.conv1, self.bn1, self.act1 = trunk.conv1, trunk.bn1, trunk.act1
        self.maxpool = nn.Identity() if stem == "small" else trunk.maxpool
        self.layer1, self.layer2, self.layer3 = trunk.layer1, trunk.layer2, trunk.layer3
        stride = 4 if stem == "resnet" else 2

        pixel_dim, made = trunk.num_features, 0  # channels of the map and tokens, behind the modules so far
        blocks = []
        for i, word in enumerate(relations):
            rate = drop_path_rate * (sum(layers) + i) / (sum(layers) + depth - 1)
            group: nn.Module = KeepTokenizer()
            if i == 0 or (projector and recurrence == "none"):
                value_groups_here = pixel_groups(pixel_dim, num_heads) if first_value or i else 0
                options = {"filter": {"value_groups": value_groups_here}, "clustering": {"iterations": iterations}}
                group = TOKENIZERS[tokenizer](pixel_dim, token_dim, num_tokens, norm=norm, **options.get(tokenizer, {}))
                made = num_tokens + made - made // 2
                group = RepeatedTokenizer(group) if i else group
            elif projector:
                group = RecurrentTokenizer(pixel_dim, token_dim, num_heads, recurrence == "half", norm=norm)
            relate = make_relation(word, token_dim, made, num_heads, key_groups, value_groups, norm, rate)
            put_back = None
            if projector and (i + 1 < depth or project_last):
                put_back = TokenProjector(pixel_dim, dim, token_dim, num_heads, norm=norm, drop_path=rate)
                pixel_dim = dim
            blocks.append(VTBlock(group, relate, put_back))
        self.layer4: VTStage | None = VTStage(nn.MaxPool2d(3, stride=2, padding=1) if pool else nn.Identity(), blocks)

        self.feature_info = [
            {"num_chs": width * BLOCKS[block].expansion, "reduction": stride * 2**i, "module": f"layer{i + 1}"}
            for i, width in enumerate(widths)
        ]
        last = stride * 2 ** (3 if pool else 2)
        self.feature_info.append({"num_chs": pixel_dim, "reduction": last, "module": "layer4"})
        self.head = ClassifierHead(token_dim, num_classes, pool_type=global_pool, drop_rate=drop_rate)

    @torch.jit.ignore
    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What this model can take of a plain ResNet (its stem and first three stages, VT-43) or of another VT.

        Gives back what is taken, and what stays new with the reason. What only the checkpoint has is left out: a
        ResNet's last stage and classifier, or the last module's projector where this model has none.
        """
        ours = self.state_dict()
        last = f"layer4.blocks.{len(self.layer4.blocks) - 1}.projector." if self.layer4 is not None else "layer4."
        if any(key.startswith("layer4.blocks.") for key in state_dict):  # a VT
            kept = {key: value for key, value in state_dict.items() if key in ours or not key.startswith(last)}
            reason = "a classifier's last module has no projector; a new one starts as the identity"
            return kept, {key: reason for key in ours if key.startswith(last) and key not in state_dict}
        if not any(key.startswith("layer4.") for key in state_dict):  # neither
            return state_dict, {}
        kept = {key: value for key, value in state_dict.items() if not key.startswith(("layer4.", "fc."))}
        reason = "a plain ResNet has no VT modules, and its classifier reads other features"
        return kept, {key: reason for key in ours if key.startswith(("layer4.", "head."))}

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return set()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^(?:conv1|bn1)", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(?:blocks\.)?(\d+)"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable
        if self.layer4 is not None:
            self.layer4.grad_checkpointing = enable

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
        """Images (B, 3, H, W) -> the chosen maps: three ResNet stages, then the map the VT modules leave.

        Without the last module's projector (see the head of this file) that is the map it read its tokens from.
        `norm` has nothing to do: a ResNet's stages end without a norm.
        """
        choose("output_fmt", output_fmt, ("NCHW",))
        take, last = feature_take_indices(len(self.feature_info), indices)
        intermediates = []
        features = self.forward_stem(x)
        for i, stage in enumerate((self.layer1, self.layer2, self.layer3)):
            if stop_early and i > last:
                break
            features = checkpoint(stage, features) if self.grad_checkpointing else stage(features)
            if i in take:
                intermediates.append(features)
        if self.layer4 is not None and not (stop_early and last < 3):
            features, tokens = self.layer4(features)
            if 3 in take:
                intermediates.append(features)
            features = as_map(tokens)
        return intermediates if intermediates_only else (features, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages behind the last chosen one, and with `prune_head` the classifier."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        for i in range(last + 1, 3):
            setattr(self, f"layer{i + 1}", nn.Identity())
        if last < 3:
            self.layer4 = None
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_stem(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/4, W/4)."""
        check_images(images, self.in_chans)
        images = channels_last(images)
        if not torch.jit.is_scripting():
            if fits_inference(images, (self.conv1,), (self.bn1,)):
                if is_usual_pool(self.maxpool):
                    return conv_norm_relu_pool(self.conv1, self.bn1, images)
                return self.maxpool(conv_norm_relu(self.conv1, self.bn1, images))
            if fits_training(images, (self.bn1,), (self.act1,)):
                return pool_features(self.maxpool, norm_relu(self.bn1, stem_conv(self.conv1, images)))
            features = stem_conv(self.conv1, images)
            if learns_compiled(features):
                return pool_features(self.maxpool, self.act1(self.bn1(features)))
        else:
            features = self.conv1(images)
        return self.maxpool(self.act1(self.bn1(features)))

    def forward_tokens(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> the last module's tokens (B, M, D)."""
        features = self.forward_stem(images)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            features = checkpoint_seq([self.layer1, self.layer2, self.layer3], features, flatten=True)
        else:
            features = self.layer3(self.layer2(self.layer1(features)))
        if self.layer4 is None:
            raise RuntimeError("this model was cut down to ResNet stages and has no tokens: use forward_intermediates.")
        return self.layer4(features)[1]

    def forward_features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> the last module's tokens as a map, one token a row: (B, D, M, 1)."""
        return as_map(self.forward_tokens(images))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """tokens as a map (B, D, M, 1) -> logits (B, K), from the mean of the tokens (VT-36)."""
        return self.head(features, pre_logits=pre_logits)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> logits (B, K)."""
        return self.forward_head(self.forward_features(images))


def make_relation(
    word: str,
    dim: int,
    num_tokens: int,
    num_heads: int,
    key_groups: int,
    value_groups: int,
    norm: bool,
    drop_path: float,
) -> nn.Module:
    """What relates the tokens of one module; see `relation` of VT."""
    if word == "transformer":
        return VisualTokenTransformer(dim, num_heads, key_groups, value_groups, norm, drop_path)
    if word == "equations":
        return EquationTransformer(dim, dim // 4, drop_path=drop_path)  # VTR-05: the width that costs as much
    if word == "graph":
        return GraphConvolution(dim, num_tokens, norm, drop_path)
    return FeedForward(dim, norm, drop_path) if word == "none" else nn.Identity()


def as_map(tokens: Tensor) -> Tensor:
    """tokens (B, M, D) -> (B, D, M, 1), as timm's heads read features; a view."""
    return tokens.transpose(1, 2).unsqueeze(3)


def _vt(name: str, pretrained: bool, **kwargs: Any) -> VT:
    if kwargs.get("features_only"):
        kwargs.setdefault("project_last", kwargs.get("projector", True))
    return build(VT, name, pretrained, **kwargs)


default_cfgs = generate_default_cfgs(
    {
        "vt_resnet18.in1k": pretrained_cfg(pool_size=(16, 1), first_conv="conv1"),
        "vt_resnet34.in1k": pretrained_cfg(pool_size=(16, 1), first_conv="conv1"),
        "vt_resnet50.in1k": pretrained_cfg(pool_size=(16, 1), first_conv="conv1"),
        "vt_resnet101.in1k": pretrained_cfg(pool_size=(16, 1), first_conv="conv1"),
        "vt_nano.untrained": pretrained_cfg(64, pool_size=(8, 1), first_conv="conv1.0"),
    }
)


@register
def vt_resnet18(pretrained: bool = False, **kwargs: Any) -> VT:
    """VT-R18. Reported: 11.7M parameters, 1.569 GFLOPs, 76.8 top-1 at 224 px (72.1 with ResNet's own recipe)."""
    size = dict(layers=(2, 2, 2), depth=2)
    return _vt("vt_resnet18", pretrained, **(size | kwargs))


@register
def vt_resnet34(pretrained: bool = False, **kwargs: Any) -> VT:
    """VT-R34. Reported: 21.9M parameters, 3.280 GFLOPs, 75.0 top-1 at 224 px with ResNet's own recipe.

    The paper's best, 79.9, is of a model with one transformer less, 19.2M: relation=("transformer", "transformer",
    "skip").
    """
    size = dict(layers=(3, 4, 6), depth=3)
    return _vt("vt_resnet34", pretrained, **(size | kwargs))


@register
def vt_resnet50(pretrained: bool = False, **kwargs: Any) -> VT:
    """VT-R50. Reported: 21.4M parameters, 3.412 GFLOPs (what 4 tokens cost: num_tokens=4), 80.6 top-1 at 224 px."""
    size = dict(block="bottleneck", layers=(3, 4, 6), depth=3, dim=1024, first_value=True)
    return _vt("vt_resnet50", pretrained, **(size | dict(key_groups=8, value_groups=8) | kwargs))


@register
def vt_resnet101(pretrained: bool = False, **kwargs: Any) -> VT:
    """VT-R101. Reported: 41.5M parameters, 7.129 GFLOPs, 82.3 top-1 at 224 px."""
    size = dict(block="bottleneck", layers=(3, 4, 23), depth=3, dim=1024)
    return _vt("vt_resnet101", pretrained, **(size | dict(key_groups=2, value_groups=8) | kwargs))


@register
def vt_nano(pretrained: bool = False, **kwargs: Any) -> VT:
    """VT for 64 to 128 px and CPUs; not in the paper. Its stem halves once, so 64 px leave 8x8 pixels to group."""
    size = dict(layers=(1, 2, 2), widths=(32, 64, 128), stem="small", depth=2, dim=256)
    return _vt("vt_nano", pretrained, **(size | dict(token_dim=256, num_tokens=8, num_heads=8) | kwargs))
