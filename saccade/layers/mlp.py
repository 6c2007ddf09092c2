"""The MLP of a transformer block, with or without a depth-wise convolution between its layers."""

from torch import Tensor, nn

from saccade.layers.conv import DepthwiseConv
from saccade.layers.linear import Linear
from saccade.layers.norm import TokenNorm
from saccade.ops import plain_layer
from saccade.ops.linear import linear_gelu
from saccade.ops.mlp import conv_mlp


class TokenMlp(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, M, D) -> tokens (B, M, D)."""
        return self.fc2(linear_gelu(tokens, self.fc1))  # fc2(gelu(fc1(tokens)))


@plain_layer
class ConvMlp(nn.Module):
    """Two linear layers with GELU and a 3x3 depth-wise convolution between them.

    SViT activates before the convolution (`act_first`), PaCa after it. `conv=False` is the plain MLP, `shortcut=False`
    drops the sum around the convolution, `sub_norm` normalises the hidden layer before fc2 (Sub-LN, arXiv 2210.06423).
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        act_first: bool = True,
        conv: bool = True,
        shortcut: bool = True,
        drop: float = 0.0,
        sub_norm: bool = False,
    ):
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.act_outside = (act_first and drop > 0) or not conv  # dropout comes between the activation and the conv
        act = "" if self.act_outside else "pre" if act_first else "post"
        self.conv = DepthwiseConv(hidden_dim, act, shortcut) if conv else nn.Identity()
        self.drop1 = nn.Dropout(drop)
        self.norm = TokenNorm(hidden_dim) if sub_norm else nn.Identity()
        self.fc2 = Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> features (B, C, H, W): drop2(fc2(norm(drop1(conv(fc1(features)))))."""
        return conv_mlp(features, self)
