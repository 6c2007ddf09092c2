"""Linear layers over the channels of a list of vectors, with batch norm behind them: 1x1 convolutions on a list."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels import HALVES, allowed, in_type, onednn, suits
from saccade.kernels import linear as learning
from saccade.kernels import linear_gelu as kernels
from saccade.kernels.grouped_linear import are_narrow, grouped_linear
from saccade.layers.batch_norm import fused_norm, heard, learns_fused
from saccade.layers.casts import both_halved, halved
from saccade.layers.kept import in_form

MANY = 16384  # rows from which on the gradient of a bias is worth a kernel, and the Python around it


class Linear(nn.Linear):
    """The library's, by its faster road for inference on CPUs, and with a faster gradient of its bias on GPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """input (…, C) -> (…, D)."""
        if not torch.jit.is_scripting():
            if onednn.suits(input):
                return onednn.linear(input, self.weight, self.bias)
            if learns_in_half(self, input):
                return learning.linear(input, self.weight, self.bias, in_use(input))
            return F.linear(input, *both_halved(self.weight, self.bias))
        return F.linear(input, self.weight, self.bias)


def learns_in_half(layer: nn.Linear, vectors: Tensor) -> bool:
    """Whether a layer learns from many rows, in half precision on a GPU."""
    if not torch.is_grad_enabled() or not isinstance(vectors, Tensor) or torch.compiler.is_compiling():
        return False
    weight, bias = layer.weight, layer.bias  # every access to a parameter is a search
    if bias is None or not weight.requires_grad or not bias.requires_grad or not suits(vectors):
        return False
    many = vectors.numel() >= MANY * vectors.shape[-1] and vectors.ndim > 1
    return many and in_use(vectors) in HALVES


def linear_gelu(layer: nn.Linear, vectors: Tensor) -> Tensor:
    """gelu(layer(vectors)), (…, C) -> (…, D).

    For inference in half precision on a GPU the library's product has the GELU inside, in its tanh form: at most 5e-4
    from the exact one, where the type's own steps are 2e-3 and more.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
        if fits_gelu(layer, vectors):
            return gelu_inside(layer, vectors)
    return F.gelu(layer(vectors))


def fits_gelu(layer: nn.Module, vectors: Tensor) -> bool:
    """Whether this is inference in half precision on a GPU, by a plain layer that nobody listens to."""
    if not isinstance(vectors, Tensor) or torch.is_grad_enabled() or not allowed("linear_gelu"):
        return False
    return left_whole(layer, vectors) and vectors.is_contiguous()


def linear_whole(layer: nn.Linear, vectors: Tensor) -> Tensor:
    """layer(vectors), which a compiler on a GPU leaves to the library as it is, in half precision."""
    if torch.compiler.is_compiling() and allowed("linear") and left_whole(layer, vectors):
        return products(kernels.linear, layer, vectors)
    return layer(vectors)


def left_whole(layer: nn.Module, vectors: Tensor) -> bool:
    """Whether this is half precision on a GPU, in a plain layer that nobody listens to."""
    plain = type(layer) in (nn.Linear, Linear) and layer.bias is not None and not heard((layer,))
    return plain and suits(vectors) and in_use(vectors) in HALVES


def in_use(vectors: Tensor) -> torch.dtype:
    """The type a product with these is computed in."""
    kind = vectors.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else vectors.dtype


def gelu_inside(layer: nn.Linear, vectors: Tensor) -> Tensor:
    return products(kernels.linear_gelu, layer, vectors)


def products(run: Callable[[Tensor, Tensor, Tensor], Tensor], layer: nn.Linear, vectors: Tensor) -> Tensor:
    """run(rows, weight, bias) in the type in use, (…, C) -> (…, D)."""
    dtype = in_use(vectors)
    rows = in_type(vectors.flatten(0, -2), dtype)
    weight, bias = both_halved(layer.weight, layer.bias)
    weight, bias = in_type(weight, dtype), in_type(bias, dtype)
    return run(rows, weight, bias).view(*vectors.shape[:-1], -1)


class GroupedLinear(nn.Module):
    """Channels in groups, each with its own matrix, without bias: a grouped 1x1 convolution.

    One product a group. In half precision on a GPU a kernel for narrow groups, and one product for all wide ones, see
    `whole`.
    """

    casts_together = True  # see saccade.layers.casts

    def __init__(self, in_dim: int, dim: int, groups: int):
        super().__init__()
        if in_dim % groups or dim % groups:
            raise ValueError(f"{in_dim} and {dim} channels do not both divide into {groups} groups; choose fewer.")
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups, in_dim // groups, dim // groups))
        nn.init.uniform_(self.weight, -((in_dim // groups) ** -0.5), (in_dim // groups) ** -0.5)  # as nn.Linear

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if suits_whole(vectors):
                weight = in_type(halved(self.weight), in_use(vectors))
                return narrow(vectors, weight) if are_groups(vectors, weight) else F.linear(vectors, whole(weight))
        grouped = vectors.unflatten(2, (self.groups, -1))  # (B, N, groups, C/groups)
        return torch.einsum("bngc,gcd->bngd", grouped, self.weight).flatten(2)

    def extra_repr(self) -> str:
        groups, in_dim, dim = self.weight.shape
        return f"{groups * in_dim}, {groups * dim}, groups={groups}"


class ListNorm(nn.Module):
    """BatchNorm over the channels of a list of vectors; the list is only viewed another way.

    `zero` starts the gain at zero: at the end of a residual branch, the branch then starts as nothing.
    `enabled=False` is no norm at all.
    """

    def __init__(self, dim: int, zero: bool = False, enabled: bool = True):
        super().__init__()
        self.bn = nn.BatchNorm1d(dim) if enabled else nn.Identity()
        if zero and enabled:
            nn.init.zeros_(self.bn.weight)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, C)."""
        rows = vectors.flatten(0, 1)
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the branch only when it stands alone)
            if learns_fused(self.bn, rows):
                return fused_norm(self.bn, rows).view(vectors.shape)
        return self.bn(rows).unflatten(0, (vectors.shape[0], vectors.shape[1]))

    def affine(self) -> tuple[Tensor, Tensor]:
        """What the norm does once its statistics are fixed: gain and bias (C,)."""
        gain = self.bn.weight * (self.bn.running_var + self.bn.eps).rsqrt()
        return gain, self.bn.bias - self.bn.running_mean * gain


class LinearNorm(nn.Module):
    """A linear map over channels without bias, grouped or not, then BatchNorm."""

    def __init__(self, in_dim: int, dim: int, groups: int = 1, zero: bool = False, norm: bool = True):
        super().__init__()
        self.groups = groups
        self.linear = GroupedLinear(in_dim, dim, groups) if groups > 1 else Linear(in_dim, dim, bias=False)
        self.norm = ListNorm(dim, zero, norm)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        return self.norm(self.linear(vectors))

    def grouped(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, groups, D/groups)."""
        return self.forward(vectors).unflatten(2, (self.groups, -1))


class FixedLinear(nn.Module):
    """What is left of `LinearNorm` once its statistics are fixed: one linear map with bias, grouped or not."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.groups = weight.shape[0] if weight.ndim == 3 else 1
        self.weight = nn.Parameter(weight, requires_grad=False)  # (D, C), or (groups, C/groups, D/groups)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        return self.grouped(vectors).flatten(2)

    def grouped(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, groups, D/groups)."""
        return fixed_linear(vectors, self.weight, self.bias, self.groups, frozen=True)


class FoldedLinearNorm(LinearNorm):
    """The same for long lists: once its statistics are fixed, the norm is folded into the matrix on the way.

    The list is then read and written once, and left group by group in memory, as attention by heads wants it.
    """

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, D)."""
        return self.grouped(vectors).flatten(2)

    def grouped(self, vectors: Tensor) -> Tensor:
        """vectors (B, N, C) -> (B, N, groups, D/groups)."""
        if self.norm.bn.training:
            return self.norm(self.linear(vectors)).unflatten(2, (self.groups, -1))
        gain, bias = self.norm.affine()
        return fixed_linear(vectors, scale_outputs(self.linear.weight, gain), bias, self.groups)


def fixed_linear(vectors: Tensor, weight: Tensor, bias: Tensor, groups: int, frozen: bool = False) -> Tensor:
    """vectors (B, N, C) -> (B, N, groups, D/groups), as attention by heads wants it.

    Group by group in memory; vector by vector where one product is taken for all groups, see `suits_whole`.
    """
    if groups == 1:
        return F.linear(vectors, weight, bias).unsqueeze(2)
    if not torch.jit.is_scripting():
        if suits_whole(vectors) and are_groups(vectors, weight):
            found = narrow(vectors, in_type(weight, in_use(vectors)), in_type(bias, in_use(vectors)))
            return found.unflatten(2, (groups, -1))
        if suits_whole(vectors):
            return F.linear(vectors, fixed_whole(vectors, weight, frozen), bias).unflatten(2, (groups, -1))
    rows = vectors.flatten(0, 1).unflatten(1, (groups, -1)).transpose(0, 1)  # (groups, B * N, C/groups)
    found = torch.baddbmm(bias.unflatten(0, (groups, 1, -1)), rows, weight)
    return found.transpose(0, 1).unflatten(0, (vectors.shape[0], vectors.shape[1]))


def suits_whole(vectors: Tensor) -> bool:
    """Whether one large product is faster than one a group: the units for half precision of a GPU wait for memory."""
    return suits(vectors) and in_use(vectors) in HALVES


def are_groups(vectors: Tensor, weight: Tensor) -> bool:
    """Whether the kernel for narrow groups may take these."""
    return allowed("grouped_linear") and are_narrow(vectors, weight)


def narrow(vectors: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """vectors (B, N, C) -> (B, N, D), by the kernel."""
    rows = in_type(vectors.flatten(0, 1), weight.dtype)
    return grouped_linear(rows, weight, bias).unflatten(0, (vectors.shape[0], vectors.shape[1]))


def whole(weight: Tensor) -> Tensor:
    """weight (groups, C/groups, D/groups) -> (D, C), zero between the groups; differentiable.

    As torch.block_diag, which takes a launch for every group.
    """
    groups, inputs, outputs = weight.shape
    matrix = weight.new_zeros(groups, outputs, groups, inputs)
    matrix.diagonal(dim1=0, dim2=2).copy_(weight.permute(2, 1, 0))  # (D/groups, C/groups, groups)
    return matrix.view(groups * outputs, groups * inputs)


def fixed_whole(vectors: Tensor, weight: Tensor, frozen: bool) -> Tensor:
    """The same in the type in use; of a constant made once."""
    weight = in_type(weight, in_use(vectors))
    if not frozen or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return whole(weight)
    return in_form(weight, "whole", lambda: whole(weight))


def scale_outputs(weight: Tensor, gain: Tensor) -> Tensor:
    """Every output channel times its gain (D,): weight (D, C), or (groups, C/groups, D/groups)."""
    return weight * (gain.unsqueeze(1) if weight.ndim == 2 else gain.unflatten(0, (weight.shape[0], 1, -1)))


def pixel_linear(in_dim: int, dim: int, groups: int = 1, norm: bool = True) -> LinearNorm:
    """The linear map for long lists, such as the pixels of a map."""
    return FoldedLinearNorm(in_dim, dim, groups) if norm else LinearNorm(in_dim, dim, groups, norm=False)
