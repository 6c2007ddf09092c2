"""Small models whose token importance is known."""

import torch
from torch import Tensor, nn

from saccade.tokens.trace import AssignmentTrace
from tests.explanation.planted import quadrants


class Grouping(nn.Module):
    """Tokens are the means of the image's quadrants."""

    def forward(self, images):
        tokens = nn.functional.adaptive_avg_pool2d(images, 2).flatten(2).mT  # (B, 4, C)
        return tokens, torch.full((len(images), 4, 16), 1 / 16)

    def trace(self, inputs, output):
        return AssignmentTrace(output[1], (4, 4), tokens=output[0])


class Regrouping(nn.Module):
    """Groups by an assignment it is given, as PaCa's later blocks do."""

    def forward(self, images, assignment):
        return assignment @ images.flatten(2).mT[:, :16], assignment


class LinearModel(nn.Module):
    """Logit of class k: sum over tokens m of weights[k, m] times the token's mean."""

    def __init__(self, weights: Tensor, regroup: bool = False):
        super().__init__()
        self.group, self.regroup = Grouping(), Regrouping() if regroup else None
        self.weights = nn.Parameter(weights)

    def forward(self, images):
        tokens, assignment = self.group(images)
        total = tokens.mean(2) @ self.weights.T
        if self.regroup is not None:
            total = total + self.regroup(images, assignment)[0].mean(2) @ self.weights.T
        return total


class QuadrantModel(nn.Module):
    """Tokens are the quadrants of any image; the logits depend on the first only."""

    class Group(nn.Module):
        def forward(self, images):
            tokens = nn.functional.adaptive_avg_pool2d(images, 2).flatten(2).mT
            return tokens, quadrants(32).assignment.expand(len(images), -1, -1)

        def trace(self, inputs, output):
            return AssignmentTrace(output[1], (32, 32), tokens=output[0])

    def __init__(self):
        super().__init__()
        self.group, self.bias = self.Group(), nn.Parameter(torch.zeros(2))

    def forward(self, images):
        brightness = self.group(images)[0][:, 0].mean(1)
        return torch.stack([brightness + 3, -brightness], 1) + self.bias
