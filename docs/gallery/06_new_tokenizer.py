"""
Write a new tokenizer
=====================

Group pixels in your own way, and let everything else (blocks, training, explanation) stay as it is. The tokenizer is
that of :doc:`/extending`: Gaussian windows with learned centres and widths.
"""

# %%
# The tokenizer returns tokens and their link to the pixels; ``trace`` makes it visible.
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import saccade
from saccade.data import Scenes
from saccade.layers import to_pixels
from saccade.tokens import TOKENIZERS, AssignmentTrace


class WindowTokenizer(nn.Module):
    """Tokens are means of the pixels under Gaussian windows with learned centres and widths."""

    def __init__(self, pixel_dim: int, token_dim: int, num_tokens: int, norm: bool = True):
        super().__init__()
        self.centre = nn.Parameter(torch.rand(num_tokens, 2))  # x y in units of the image
        self.log_width = nn.Parameter(torch.full((num_tokens, 1), -1.5))
        self.to_token = nn.Linear(pixel_dim, token_dim)
        self.norm = nn.LayerNorm(token_dim) if norm else nn.Identity()

    def forward(self, features: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """features (B, C, H, W) -> tokens (B, M, D), assignment (B, M, N)."""
        batch, _, height, width = features.shape
        y = (torch.arange(height, device=features.device) + 0.5) / height
        x = (torch.arange(width, device=features.device) + 0.5) / width
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).reshape(-1, 2)  # (N, 2)
        distance = torch.cdist(self.centre, grid) / self.log_width.exp()  # (M, N)
        assignment = (-distance.square()).softmax(-1)  # sums to 1 over pixels
        assignment = assignment.to(features.dtype).expand(batch, -1, -1)
        return self.norm(self.to_token(assignment @ to_pixels(features))), assignment

    def trace(self, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> AssignmentTrace:
        tokens, assignment = output
        return AssignmentTrace(assignment, tuple(inputs[0].shape[2:]), tokens=tokens)


# %%
# A model with it. ``vt_nano`` is a small ResNet whose last stage works on tokens.
torch.manual_seed(0)
TOKENIZERS["window"] = WindowTokenizer
model = saccade.create_model("vt_nano", num_classes=10, tokenizer="window", num_tokens=8)

# %%
# Train it for a few steps on rendered shapes: an ordinary PyTorch loop.
scenes = Scenes(count=256, size=64, split="train", seed=0)
frames = [scenes.frame(i) for i in range(256)]
images = torch.stack([torch.from_numpy(frame.image.copy()) for frame in frames]).movedim(3, 1) / 127.5 - 1
labels = torch.tensor([frame.label for frame in frames])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(40):
    batch = torch.randint(0, 256, (32,))
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {sum(losses[-5:]) / 5:.2f}")

# %%
# Its eight windows, as ``saccade.record`` sees those of any other model.
model.eval()
with torch.no_grad(), saccade.record(model) as traces:
    model(images[:1])
figure, axes = plt.subplots(1, 9, figsize=(12, 1.6))
axes[0].imshow(images[0].movedim(0, 2) / 2 + 0.5)
for axis, window in zip(axes[1:], traces[0].maps()[0], strict=True):
    axis.imshow(window, cmap="magma")
for axis in axes:
    axis.axis("off")
figure.tight_layout()
