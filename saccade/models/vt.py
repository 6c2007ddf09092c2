"""VT: visual transformers, a ResNet whose last stage works on a few tokens (arXiv 2006.03677).

group     tokens.visual_tokens.FilterTokenizer (Eq. 1), then tokens.visual_tokens.RecurrentTokenizer (Eq. 2)
relate    layers.relation.VisualTokenTransformer (Eqs. 3-4)
put back  tokens.projector.TokenProjector (Eq. 5)

The authors published no code for the classifiers. The equations leave widths, heads, norms and scales open; this is
the reading that reproduces the printed costs (docs/vt.md compares every row of the paper's tables).

For stable training, where the equations have neither scale nor norm: scores are divided by the square root of their
width, every matrix is followed by batch norm, so tokens keep the magnitude of the ResNet's features, and the gain of
the last norm of every residual branch (attention, feed-forward, projector) is initialised to zero: a randomly
initialised VT stage returns its tokens and features unchanged. `relation="equations"` follows Eqs. 3-4 literally.

timm's interface: image-level tasks read the tokens, pixel-level tasks the features (VT Sec. 3), so
  forward_features   returns the last tokens in timm's feature layout, one token per row: (B, token_dim, M, 1);
  forward_head       averages them (VT Sec. 4) and classifies; global_pool="" returns them as they are;
  forward_tokens     returns them as (B, M, token_dim);
  features_only, forward_intermediates  return features: ResNet stages at strides 4, 8, 16, then the projected ones,
                     average-pooled to stride 32 (as decoders expect), or at stride 16 with `output_stride=16`.
The classifier's last module has no projector, since nothing reads its features. `features_only=True` adds one
(`project_last`), so that the last features contain the last tokens; it is initialised as the identity, so a
classifier's weights give the same features in both, and loading reports that it is randomly initialised.
"""

from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from timm.layers import ClassifierHead
from timm.models import checkpoint, checkpoint_seq, generate_default_cfgs
from timm.models.resnet import ResNet
from torch import Tensor, nn

from saccade import ops
from saccade.layers.relation import EquationTransformer, FeedForward, GraphConvolution, VisualTokenTransformer
from saccade.models.classifier import StagedClassifier
from saccade.models.registry import build, choose, leaf, pretrained_cfg, register
from saccade.models.resnet import FusedBasicBlock, FusedBottleneck
from saccade.tokens.projector import TokenProjector
from saccade.tokens.visual_tokens import TOKENIZERS, KeepTokenizer, RecurrentTokenizer, RepeatedTokenizer, pixel_groups

__all__ = ["VT", "insert"]

BLOCKS = {"basic": FusedBasicBlock, "bottleneck": FusedBottleneck}
RELATIONS = ("transformer", "equations", "graph", "none", "skip")


class VTBlock(nn.Module):
    """One VT module (VT Sec. 3): group, relate, put back; without a projector the features stay as they are."""

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


@leaf
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
        tokens: Tensor | None = None
        for block in self.blocks:
            if self.grad_checkpointing:
                features, tokens = checkpoint(block, features, tokens)
            else:
                features, tokens = block(features, tokens)
        assert tokens is not None  # there is at least one module
        return features, tokens


class VTOptions(NamedTuple):
    """Options of the VT modules, in `VT` and `insert`.

    Args:
        token_dim: channels of the tokens.
        num_tokens: tokens of a tokenizer; 16, 32 and 64 in VT Table 6.
        num_heads: heads of all attention, over pixels and over tokens.
        tokenizer: of the first module: "filter", "clustering" or "pooling" (VT Table 3), or your own in `TOKENIZERS`.
        recurrence: of the others (VT Table 4): "half" of the tokens are queries and are replaced, "full" all of them,
            "none" makes tokens as the first module does, beside half of the previous ones.
        relation: "transformer", "graph" or "none" (VT Table 5; "none" keeps the feed-forward map of each token),
            "equations" (Eqs. 3-4, literally), "skip" (nothing); one word, or one per module.
        key_groups, value_groups: channel groups of the transformer's queries and keys, and of its values.
        value_projection: whether the first module's filters average a grouped linear map of the pixels, as later ones
            do.
        norm: whether the VT modules have batch norm.
        score_norm: whether scores of filters have one before their scale, as in the authors' VT-FPN module.
        relu: whether the feed-forward layers have the ReLU of VT Eq. 4, which that module does not have.
        iterations: of the k-means of the clustering tokenizer.
    """

    token_dim: int = 1024
    num_tokens: int = 16
    num_heads: int = 16
    tokenizer: str = "filter"
    recurrence: str = "half"
    relation: str | Sequence[str] = "transformer"
    key_groups: int = 1
    value_groups: int = 1
    value_projection: bool = False
    norm: bool = True
    score_norm: bool = False
    relu: bool = True
    iterations: int = 10

    def relations(self, depth: int) -> list[str]:
        """The relation of each of `depth` modules, after a check of all options that are words."""
        choose("tokenizer", self.tokenizer, tuple(TOKENIZERS))
        choose("recurrence", self.recurrence, ("half", "full", "none"))
        relations = [self.relation] * depth if isinstance(self.relation, str) else list(self.relation)
        for word in relations:
            choose("relation", word, RELATIONS)
        if len(relations) != depth:
            raise ValueError(f"relation must be one word or one for each of {depth} modules; got {relations}.")
        if self.recurrence == "half" and self.num_tokens < 2:
            raise ValueError(
                f'expected num_tokens >= 2 with recurrence="half", got {self.num_tokens}. Use more, or '
                'recurrence="full".'
            )
        return relations


class VT(StagedClassifier):
    """Stem and first three stages of a ResNet, then VT modules (VT Table 11), with timm's interface and names.

    Args:
        block, layers, widths: ResNet stages: "basic" or "bottleneck", number of blocks, width of the blocks.
        stem: "resnet" (7x7 convolution and max pooling, stride 4) or "small" (three 3x3 convolutions, stride 2).
        depth: number of VT modules.
        dim: channels of the VT modules' features.
        projector: whether tokens are projected onto the features (VT Table 7). Without, later modules only relate.
        project_last: whether the last module has a projector too. A classifier does not read its features.
        pool: whether the features are max-pooled by 2 before the VT modules.
        output_stride: of the last features: that of the VT modules, or twice that, by average pooling; None for strides
            that double from stage to stage.
        drop_rate, drop_path_rate: dropout before the classifier, stochastic depth in ResNet blocks and VT modules.
        modules: options of the VT modules, see `VTOptions`; `key_groups` is 2 by default.
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
        projector: bool = True,
        project_last: bool = False,
        pool: bool = False,
        output_stride: int | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **modules: Any,
    ):
        choose("block", block, tuple(BLOCKS))
        choose("stem", stem, ("resnet", "small"))
        modules.setdefault("key_groups", 2)
        options = VTOptions(**modules)
        super().__init__(in_chans, num_classes, options.token_dim)
        self.grad_checkpointing = False

        num_blocks = sum(layers) + depth  # rates of stochastic depth increase up to the last VT module
        rates = [drop_path_rate * i / (num_blocks - 1) for i in range(num_blocks)]
        backbone = _resnet_stages(block, layers, widths, stem, in_chans, rates[sum(layers) - 1])
        self.conv1, self.bn1, self.act1, self.maxpool = backbone.conv1, backbone.bn1, backbone.act1, backbone.maxpool
        self.layer1, self.layer2, self.layer3 = (backbone.get_submodule(f"layer{i}") for i in (1, 2, 3))

        projected = [projector and (i + 1 < depth or project_last) for i in range(depth)]
        blocks, last_dim = _vt_modules(options, backbone.num_features, dim, projected, rates[sum(layers) :])
        self.layer4: VTStage | None = VTStage(nn.MaxPool2d(3, stride=2, padding=1) if pool else nn.Identity(), blocks)

        stride = 4 if stem == "resnet" else 2
        self.feature_info = [
            {"num_chs": width * BLOCKS[block].expansion, "reduction": stride * 2**i, "module": f"layer{i + 1}"}
            for i, width in enumerate(widths)
        ]
        stage4, last = stride * 2 ** (3 if pool else 2), output_stride or stride * 8
        if last not in (stage4, stride * 8):
            raise ValueError(f"output_stride must be {stage4} or {stride * 8}, got {output_stride}.")
        self.last_pool = nn.Identity() if last == stage4 else nn.AvgPool2d(2, ceil_mode=True)
        self.feature_info.append({"num_chs": last_dim, "reduction": last, "module": "layer4"})
        self.head = ClassifierHead(options.token_dim, num_classes, pool_type=global_pool, drop_rate=drop_rate)

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weights of a plain ResNet (its stem and first three stages) or of another VT that this model can load.

        Returns them, and the keys that stay randomly initialised with the reason. Left out is what only the checkpoint
        has: the last stage and classifier of a ResNet, or the last module's projector.
        """
        ours = self.state_dict()
        last = f"layer4.blocks.{len(self.layer4.blocks) - 1}.projector." if self.layer4 is not None else "layer4."
        if any(key.startswith("layer4.blocks.") for key in state_dict):  # a VT
            loaded = {key: value for key, value in state_dict.items() if key in ours or not key.startswith(last)}
            reason = "a classifier's last module has no projector; a new one starts as the identity"
            return loaded, {key: reason for key in ours if key.startswith(last) and key not in state_dict}
        if not any(key.startswith("layer4.") for key in state_dict):  # neither
            return state_dict, {}
        loaded = {key: value for key, value in state_dict.items() if not key.startswith(("layer4.", "fc."))}
        reason = "a plain ResNet has no VT modules, and its classifier reads other features"
        return loaded, {key: reason for key in ours if key.startswith(("layer4.", "head."))}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^(?:conv1|bn1)", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(?:blocks\.)?(\d+)"}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable
        if self.layer4 is not None:
            self.layer4.grad_checkpointing = enable

    @ops.model_pass
    def forward_stages(self, images: Tensor, count: int, take: Collection[int]) -> tuple[Tensor, list[Tensor]]:
        """Features of three ResNet stages, then of the VT modules, after which the first result is the tokens.

        Without the last module's projector (see the head of this file) the latter are those it read its tokens from.
        """
        features, intermediates = self.forward_stem(images), []
        for i, stage in enumerate((self.layer1, self.layer2, self.layer3)[:count]):
            features = checkpoint_seq(stage, features) if self.grad_checkpointing else stage(features)
            if i in take:
                intermediates.append(features)
        if self.layer4 is not None and count > 3:
            features, tokens = self.layer4(features)
            if 3 in take:
                intermediates.append(self.last_pool(features))
            features = tokens.transpose(1, 2).unsqueeze(3)  # (B, D, M, 1), as timm's heads read features
        return features, intermediates

    def drop_stages(self, count: int) -> None:
        for i in range(count, 3):
            setattr(self, f"layer{i + 1}", nn.Sequential())  # the identity
        if count <= 3:
            self.layer4 = None

    def forward_stem(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> features (B, C, H/4, W/4)."""
        return ops.conv_norm_relu_pool(self.prepared(images), self.conv1, self.bn1, self.maxpool)

    def forward_tokens(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> the last module's tokens (B, M, D)."""
        return self.forward_features(images).squeeze(3).transpose(1, 2)

    def forward_features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> the last module's tokens as features, one token per row: (B, D, M, 1)."""
        if self.layer4 is None:
            raise RuntimeError("this model was pruned to ResNet stages and has no tokens. Use forward_intermediates.")
        return self.forward_stages(images, 4, ())[0]


def insert(
    model: nn.Module, stage: str | None = None, depth: int = 2, pool: bool | None = None, **options: Any
) -> nn.Module:
    """Replace a stage of a timm backbone by VT modules, in place (VT Sec. 4: VTs replace convolution stages).

    Args:
        model: any timm model with `feature_info` whose stages map features (B, C, H, W) to features (B, C', H', W').
        stage: name of the stage as in `feature_info`, such as "layer4" or "stages.2"; the last by default. The VT
            modules return features with its channels.
        depth: number of VT modules.
        pool: whether features are max-pooled by 2 first. By default not in the last stage, as in VT-ResNets, and
            elsewhere, so that later stages read the usual resolution.
        options: of the VT modules, see `VTOptions`.
    """
    info: Any = model.feature_info  # a list of dicts, or timm's FeatureInfo
    names: list[str] = [entry["module"] for entry in info]
    stage = names[-1] if stage is None else stage
    choose("stage", stage, tuple(names))
    if unknown := set(options) - set(VTOptions._fields):
        raise TypeError(f"insert has no option {sorted(unknown)[0]!r}. Options: {', '.join(VTOptions._fields)}.")
    blocks, _ = _vt_modules(VTOptions(**options), *_stage_channels(model, stage), [True] * depth, [0.0] * depth)
    halve = stage != names[-1] if pool is None else pool
    model.set_submodule(stage, FeatureStage(nn.MaxPool2d(3, stride=2, padding=1) if halve else nn.Identity(), blocks))
    return model


class FeatureStage(VTStage):
    """VT modules that return features only, as a stage of another backbone does."""

    def forward(self, features: Tensor) -> Tensor:  # type: ignore[override]
        """features (B, C, H, W) -> features (B, C', H, W)."""
        return super().forward(features)[0]


def _stage_channels(model: nn.Module, stage: str) -> tuple[int, int]:
    """Channels that a stage reads and returns, from a run on the meta device."""
    shapes: list[tuple[int, ...]] = []
    copy: Any = deepcopy(model).to("meta").eval()
    copy.get_submodule(stage).register_forward_hook(
        lambda _, inputs, output: shapes.extend((tuple(inputs[0].shape), tuple(output.shape)))
    )
    config = getattr(model, "pretrained_cfg", None) or {}
    with torch.no_grad():
        copy(torch.empty(1, *config.get("input_size", (3, 224, 224)), device="meta"))
    channels = next(entry["num_chs"] for entry in copy.feature_info if entry["module"] == stage)
    if [len(shape) for shape in shapes] != [4, 4] or shapes[1][1] != channels:
        raise ValueError(f"expected stage {stage} to map features (B, C, H, W), got shapes {shapes}. Choose another.")
    return shapes[0][1], channels


def _resnet_stages(
    block: str, layers: Sequence[int], widths: Sequence[int], stem: str, in_chans: int, drop_path_rate: float
) -> ResNet:
    """The stem and the stages before the VT modules (VT Table 11); `drop_path_rate` is that of the last block."""
    resnet = ResNet(
        BLOCKS[block],
        tuple(layers),  # type: ignore[arg-type] (timm says four; three stages work)
        num_classes=0,
        in_chans=in_chans,
        stem_type="deep" if stem == "small" else "",
        stem_width=widths[0] // 2 if stem == "small" else 64,
        channels=tuple(widths),
        drop_path_rate=drop_path_rate,
    )
    if stem == "small":
        setattr(resnet, "maxpool", nn.Identity())  # noqa: B010 (timm declares a pooling layer)
    return resnet


def _vt_modules(
    options: VTOptions, pixel_dim: int, dim: int, projected: Sequence[bool], rates: Sequence[float]
) -> tuple[list[VTBlock], int]:
    """One VT module per drop path rate, and the channels of the features that the last one returns."""
    relations = options.relations(len(rates))
    token_dim, num_heads, norm = options.token_dim, options.num_heads, options.norm
    blocks, count = [], 0  # count: tokens so far
    for i, (relation, project, rate) in enumerate(zip(relations, projected, rates, strict=True)):
        group: nn.Module
        if i > 0 and not projected[i - 1]:
            group = KeepTokenizer()  # the features have not changed
        elif i == 0 or options.recurrence == "none":
            groups = pixel_groups(pixel_dim, num_heads) if options.value_projection or i else 0
            filters = {"value_groups": groups, "score_norm": options.score_norm}
            own = {"filter": filters, "clustering": {"iterations": options.iterations}}.get(options.tokenizer, {})
            group = TOKENIZERS[options.tokenizer](pixel_dim, token_dim, options.num_tokens, norm=norm, **own)
            count = options.num_tokens + count - count // 2
            group = RepeatedTokenizer(group) if i else group
        else:
            group = RecurrentTokenizer(pixel_dim, token_dim, num_heads, options.recurrence == "half", norm=norm)
        relate = _relation(relation, options, count, rate)
        put_back = None
        if project:
            put_back = TokenProjector(pixel_dim, dim, token_dim, num_heads, norm=norm, drop_path=rate)
            pixel_dim = dim
        blocks.append(VTBlock(group, relate, put_back))
    return blocks, pixel_dim


def _relation(word: str, options: VTOptions, num_tokens: int, drop_path: float) -> nn.Module:
    """The layers that relate the tokens of one module; see `relation` of `VTOptions`."""
    dim, norm, relu = options.token_dim, options.norm, options.relu
    if word == "transformer":
        groups = options.key_groups, options.value_groups
        return VisualTokenTransformer(dim, options.num_heads, *groups, norm, drop_path, relu)
    if word == "equations":
        return EquationTransformer(dim, dim // 4, drop_path=drop_path)  # the width that costs as much as "transformer"
    if word == "graph":
        return GraphConvolution(dim, num_tokens, norm, drop_path)
    return FeedForward(dim, norm, drop_path, relu) if word == "none" else nn.Identity()


def _vt(name: str, pretrained: bool, **kwargs: Any) -> VT:
    if "first_value" in kwargs:
        raise TypeError("first_value is now value_projection. Use value_projection=True or False.")
    if kwargs.get("features_only"):
        kwargs.setdefault("project_last", kwargs.get("projector", True))
    return build(VT, name, pretrained, **kwargs)


default_cfgs = generate_default_cfgs(
    {
        **{f"vt_resnet{n}.in1k": pretrained_cfg(pool_size=(16, 1), first_conv="conv1") for n in (18, 34, 50, 101)},
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
    size = dict(block="bottleneck", layers=(3, 4, 6), depth=3, dim=1024, value_projection=True)
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
