"""SparseFormer's dense head (arXiv 2304.03768, appendix A.2): tokens restored to a feature map, then classified."""

from torch import Tensor, nn

from saccade.heads.classifier import PixelClassifier
from saccade.layers.conv import ConvNormRelu
from saccade.tokens.locate import LocationAttention


class SparseHead(nn.Module):
    """Location-aware cross-attention from the early feature map to the tokens, two 3x3 convolutions, a classifier.

    The paper gives no widths; token_dim, 256, 256 reproduce the 33 GFLOPs of its Table 8.
    """

    def __init__(self, pixel_dim: int, token_dim: int, num_classes: int, dim: int = 256, dropout: float = 0.1):
        super().__init__()
        self.locate = LocationAttention(pixel_dim, token_dim)
        self.conv1 = ConvNormRelu(token_dim, dim, 3)
        self.conv2 = ConvNormRelu(dim, dim, 3)
        self.classifier = PixelClassifier(dim, num_classes, dropout)

    def forward(self, backbone_output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, None]:
        """tokens (B, M, D), regions (B, M, 4), features (B, C, H, W) -> logits (B, K, H, W); no auxiliary logits."""
        tokens, regions, features = backbone_output
        return self.classifier(self.conv2(self.conv1(self.locate(features, tokens, regions)))), None
