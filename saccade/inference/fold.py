"""Fold batch norms with fixed statistics into the layers next to them.

Data flow decides which layer, not names: modules are traced with torch.fx as far as possible, and a norm is folded only
if it is the only reader of the layer before it, or if a single point-wise layer reads it. What cannot be traced or
folded (a norm between an activation and a padded convolution, for example) becomes one multiplication and addition.
"""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from timm.layers import BatchNormAct2d, DropPath
from timm.models import get_notrace_functions, get_notrace_modules
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torchvision.ops import FrozenBatchNorm2d

from saccade.layers.linear import FixedLinear, FoldedLinearNorm, Linear, LinearNorm, ListNorm, scale_outputs
from saccade.layers.norm import ChannelAffine

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, FrozenBatchNorm2d, ListNorm)  # and their subclasses
PLAIN = (nn.Linear, Linear)  # other subclasses may compute more
IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout2d, DropPath)  # in evaluation mode
LEAVES = (_ConvNd, nn.Linear, FixedLinear, nn.LayerNorm, nn.GroupNorm, *NORMS, *IDENTITIES)


def fold_norms(model: nn.Module) -> int:
    """Fold the batch norms of `model` (in evaluation mode) in place; return how many were folded.

    Norms without running statistics or in training mode are not folded.
    """
    folded = _replace_linear_norms(model)
    names = {module: name for name, module in model.named_modules()}
    shared = Counter(id(parameter) for module in names for parameter in module.parameters(recurse=False))
    for root, graph in _graphs(model):
        folded += _fold_graph(root, graph, names, shared)
    _replace_remaining(model)
    return folded


def affine(norm: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Gain and shift (C,) of a norm with fixed statistics, in float64; None if they are not fixed."""
    norm = norm.bn if isinstance(norm, ListNorm) else norm
    if not isinstance(norm, (_BatchNorm, FrozenBatchNorm2d)) or (isinstance(norm, _BatchNorm) and norm.training):
        return None
    fixed: Any = norm  # the buffers of torchvision's FrozenBatchNorm2d are not declared
    if fixed.running_mean is None or fixed.running_var is None:
        return None
    gain = (fixed.running_var.double() + fixed.eps).rsqrt()
    gain = gain if fixed.weight is None else gain * fixed.weight.double()
    shift = -fixed.running_mean.double() * gain
    return gain, shift if fixed.bias is None else shift + fixed.bias.double()


class _Tracer(fx.Tracer):
    """Trace down to single layers, but not into modules that cannot be traced."""

    def __init__(self, opaque: set[nn.Module]):
        super().__init__(autowrap_functions=tuple(get_notrace_functions()))
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.opaque or isinstance(m, LEAVES) or super().is_leaf_module(m, module_qualified_name)


def _graphs(model: nn.Module) -> Iterator[tuple[nn.Module, fx.Graph]]:
    """The largest modules whose forward can be traced, each with its graph.

    A forward may store something in its module, so a copy is traced: new modules that share the tensors.
    """
    tensors = {id(value): value for value in [*model.parameters(), *model.buffers()]}
    copy = deepcopy(model, memo=tensors)
    modules = dict(model.named_modules())
    for name, graph in _largest(copy):
        yield modules[name], graph


def _largest(model: nn.Module) -> Iterator[tuple[str, fx.Graph]]:
    traced: dict[nn.Module, fx.Graph] = {}
    opaque: set[nn.Module] = set()
    notrace = tuple(get_notrace_modules())
    for module in reversed(list(model.modules())):  # children before parents
        if isinstance(module, (*LEAVES, nn.ModuleList, nn.ModuleDict)):
            continue
        try:
            if isinstance(module, notrace):
                opaque.add(module)  # for its parents; its own forward may still be traced
            traced[module] = _Tracer(opaque - {module}).trace(module)
        except Exception:  # control flow, len(), item(), ...: not traceable
            opaque.add(module)
            traced.pop(module, None)
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():  # parents before children
        if module in traced and module not in inside:
            inside |= _followed(module, opaque)
            yield name, traced[module]


def _followed(root: nn.Module, opaque: set[nn.Module]) -> set[nn.Module]:
    """Modules whose forward is part of the trace of `root`."""
    modules = {root}
    for child in root.children():
        if child not in opaque:
            modules |= _followed(child, opaque)
    return modules


def _fold_graph(root: nn.Module, graph: fx.Graph, names: dict[nn.Module, str], shared: Counter) -> int:
    """Fold norms until nothing changes; folded norms are removed from the graph, so that chains of norms fold too."""
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")

    def module(node: Any) -> nn.Module | None:
        """The module a node calls, if it is called once and shares no weights."""
        if not isinstance(node, fx.Node) or node.op != "call_module" or calls[node.target] > 1:
            return None
        layer = root.get_submodule(str(node.target))
        unshared = all(shared[id(parameter)] == 1 for parameter in layer.parameters())
        return layer if unshared and layer in names else None

    def remove(node: fx.Node) -> None:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)

    for node in list(graph.nodes):
        if isinstance(module(node), IDENTITIES):
            remove(node)
    folded, changed = 0, True
    while changed:
        changed = False
        for node in list(graph.nodes):
            norm = module(node)
            if not isinstance(norm, NORMS) or (fixed := affine(norm)) is None or len(node.args) != 1:
                continue
            alone = isinstance(node.args[0], fx.Node) and len(node.args[0].users) == 1
            taken = alone and _into_previous(module(node.args[0]), norm, *fixed)
            if not taken and not isinstance(norm, BatchNormAct2d):  # which has an activation after the norm
                reader, moved = _only_reader(node)
                taken = _into_next(module(reader), moved, norm, *fixed)
            if not taken:
                continue
            if not _remove(root, str(node.target), norm):
                remove(node)
            folded, changed = folded + 1, True
    return folded


def _only_reader(node: fx.Node) -> tuple[fx.Node | None, bool]:
    """The only reader of this node, across a permute to channels-last; and whether there was such a permute."""
    moved = False
    while len(node.users) == 1:
        (reader,) = node.users
        if reader.op == "call_method" and reader.target == "permute" and reader.args[1:] == (0, 2, 3, 1) and not moved:
            node, moved = reader, True
            continue
        return reader, moved
    return None, moved


@torch.no_grad()
def _into_previous(layer: Any, norm: nn.Module, gain: Tensor, shift: Tensor) -> bool:
    """Scale and shift the outputs of the layer before the norm, if it is linear."""
    if isinstance(layer, _ConvNd) and not isinstance(norm, ListNorm):
        # A subclass may compute more than a convolution (an activation, a sum).
        if type(layer).__module__.partition(".")[0] != "torch" or isinstance(layer, _ConvTransposeNd):
            return False
        weight = layer.weight.double() * gain.view(-1, *(1,) * (layer.weight.ndim - 1))
    elif (type(layer) in PLAIN or isinstance(layer, FixedLinear)) and isinstance(norm, ListNorm):
        weight = scale_outputs(layer.weight.double(), gain)
    else:
        return False
    bias = shift if layer.bias is None else shift + gain * layer.bias.double()
    _set(layer, weight, bias)
    return True


@torch.no_grad()
def _into_next(layer: Any, moved: bool, norm: nn.Module, gain: Tensor, shift: Tensor) -> bool:
    """Scale the inputs of the point-wise layer after the norm, and add the shift to its bias.

    `moved`: a permute between the two moves channels to the end.
    """
    listed = isinstance(norm, ListNorm)  # channels are its last axis
    if listed != moved and (type(layer) in PLAIN or (isinstance(layer, FixedLinear) and layer.groups == 1)):
        weight = layer.weight.double()
        extra = weight @ shift
        weight = weight * gain
    elif not listed and not moved and type(layer) is nn.Conv2d and _pointwise(layer):
        weight = layer.weight.double()
        extra = weight[:, :, 0, 0] @ shift
        weight = weight * gain.view(1, -1, 1, 1)
    else:
        return False
    _set(layer, weight, extra if layer.bias is None else layer.bias.double() + extra)
    return True


def _pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.padding in ((0, 0), "valid") and layer.groups == 1


def _set(layer: Any, weight: Tensor, bias: Tensor) -> None:
    like = layer.weight
    layer.weight = nn.Parameter(weight.to(like.dtype, memory_format=torch.preserve_format), requires_grad=False)
    layer.bias = nn.Parameter(bias.to(like.dtype), requires_grad=False)


def _remove(root: nn.Module, name: str, norm: nn.Module) -> bool:
    """Remove a folded norm from its parent; True if its activation remains in its place."""
    if isinstance(norm, ListNorm):
        norm.bn = nn.Identity().eval()
        return False
    parent, _, child = name.rpartition(".")
    replacement: nn.Module = nn.Identity()
    if isinstance(norm, BatchNormAct2d):
        after: Any = norm  # timm does not declare its layers
        replacement = nn.Sequential(after.drop, after.act)
    setattr(root.get_submodule(parent), child, replacement.eval())
    return isinstance(norm, BatchNormAct2d)


@torch.no_grad()
def _replace_linear_norms(model: nn.Module) -> int:
    """Replace linear layers with a norm of their own by one linear layer."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, (LinearNorm, FoldedLinearNorm)) or (fixed := affine(child.norm)) is None:
                continue
            gain, shift = fixed
            weight = child.linear.weight
            fused = FixedLinear(scale_outputs(weight.double(), gain).to(weight.dtype), shift.to(weight.dtype))
            setattr(parent, name, fused.eval())
            count += 1
    return count


@torch.no_grad()
def _replace_remaining(model: nn.Module) -> None:
    """Replace the remaining norms of feature maps by a multiplication and an addition, accurate in any dtype."""
    axes = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in axes or (fixed := affine(child)) is None:
                continue
            assert isinstance(child, _BatchNorm)
            assert child.running_mean is not None
            gain, shift = (value.to(child.running_mean.dtype) for value in fixed)
            setattr(parent, name, ChannelAffine(gain, shift, axes[type(child)]).eval())
