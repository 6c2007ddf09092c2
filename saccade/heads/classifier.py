"""Last layer of every dense head."""

from torch import Tensor, nn


class PixelClassifier(nn.Module):
    """Channel dropout and a 1x1 convolution."""

    def __init__(self, dim: int, num_classes: int, dropout: float = 0.1):
        super().__init__()
        self.drop = nn.Dropout2d(dropout)
        self.fc = nn.Conv2d(dim, num_classes, 1)
        nn.init.normal_(self.fc.weight, std=0.01)
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, C, H, W) -> logits (B, K, H, W)."""
        return self.fc(self.drop(features))
