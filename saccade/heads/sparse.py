"""SparseFormer per pixel: the few tokens put back on the map they looked at (appendix A.2, SF-71 … SF-74)."""

from torch import Tensor, nn

from saccade.heads.classifier import PixelClassifier
from saccade.layers.conv import ConvNormRelu
from saccade.tokens.locate import LocationAttention


class SparseHead(nn.Module):
    """Every pixel of the early features asks the tokens, the nearer the better; then two 3x3 convolutions.

    The paper gives no widths; these meet its 33 GFLOPs (SF-73).
    """

    def __init__(self, pixel_dim: int, token_dim: int, num_classes: int, dim: int = 256, dropout: float = 0.1):
        super().__init__()
        self.locate = LocationAttention(pixel_dim, token_dim)
        self.conv1 = ConvNormRelu(token_dim, dim, 3)
        self.conv2 = ConvNormRelu(dim, dim, 3)
        self.classifier = PixelClassifier(dim, num_classes, dropout)

    def forward(self, seen: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, None]:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W) -> logits (B, K, H, W), no second opinion."""
        tokens, regions, features = seen
        return self.classifier(self.conv2(self.conv1(self.locate(features, tokens, regions)))), None
