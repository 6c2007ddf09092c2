"""The last layer of every dense head: one linear classifier for all pixels, behind dropout of whole channels."""

from torch import Tensor, nn


class PixelClassifier(nn.Module):
    """Dropout2d and a 1x1 convolution."""

    def __init__(self, dim: int, num_classes: int, dropout: float = 0.1):
        super().__init__()
        self.drop = nn.Dropout2d(dropout)
        self.fc = nn.Conv2d(dim, num_classes, 1)
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> logits (B, K, H, W)."""
        return self.fc(self.drop(features))
