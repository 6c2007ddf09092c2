"""Importance from outside, on models whose tokens' worth is known."""

import pytest
import torch
from torch import nn

import saccade
from saccade.explain.hooks.gates import gated
from saccade.explain.scores.importance import by_gradient, by_occlusion, class_logits, class_score
from saccade.tokens.trace import AssignmentTrace


class Grouping(nn.Module):
    """Tokens are the means of the quadrants of the first channel."""

    def forward(self, images):
        tokens = nn.functional.adaptive_avg_pool2d(images, 2).flatten(2).mT  # (B, 4, C)
        return tokens, torch.full((len(images), 4, 16), 1 / 16)

    def trace(self, inputs, output):
        return AssignmentTrace(output[1], (4, 4), tokens=output[0])


class Again(nn.Module):
    """Groups by an assignment it is given, as PaCa's later blocks do."""

    def forward(self, images, assignment):
        return assignment @ images.flatten(2).mT[:, :16], assignment


class Weighing(nn.Module):
    """Logit of class k: the tokens' values, token m counting w[k, m]."""

    def __init__(self, weights, again=False):
        super().__init__()
        self.group, self.again = Grouping(), Again() if again else None
        self.weights = nn.Parameter(weights)

    def forward(self, images):
        tokens, assignment = self.group(images)
        total = tokens.mean(2) @ self.weights.T
        if self.again is not None:
            total = total + self.again(images, assignment)[0].mean(2) @ self.weights.T
        return total


WEIGHTS = torch.tensor([[3.0, -1.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]])


@pytest.mark.parametrize("again", [False, True])
def test_a_linear_model_gives_each_token_its_own_share(again):
    model, images = Weighing(WEIGHTS, again), torch.rand(2, 3, 4, 4)
    values = nn.functional.adaptive_avg_pool2d(images, 2).mean(1).flatten(1)
    if again:
        values = values + images.flatten(2).mean(1).mean(1, keepdim=True)
    (slope,) = by_gradient(model, images, class_score(0), [4])
    torch.testing.assert_close(slope, values * WEIGHTS[0])
    drop = by_occlusion(model, images[:1], class_score(0), step=0, count=4, batch=3)
    torch.testing.assert_close(drop, values[0] * WEIGHTS[0])


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "vt_nano", "sparseformer_nano"])
def test_every_family_can_be_gated_and_importances_agree(name):
    """Gates of 1 change nothing, bit by bit; the slope at 1 is what a small turn of the gate does."""
    torch.manual_seed(0)
    model = saccade.create_model(name, num_classes=10).eval().double()
    for parameter in model.parameters():  # adjusters and the like start at zero
        nn.init.normal_(parameter, std=0.05) if parameter.abs().max() == 0 else None
    images = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad(), saccade.record(model) as traces:
        whole = model(images)
    from saccade.explain.drawing.colours import num_tokens

    counts = [num_tokens(trace) for trace in traces]
    slopes = by_gradient(model, images, class_score(3), counts)
    for step, count in enumerate(counts):
        ones = torch.ones(1, count, dtype=torch.float64)
        with torch.no_grad(), gated(model, {step: ones}):
            assert torch.equal(model(images), whole)
        small = 1e-4
        for token in (0, count - 1):
            ends = []
            for sign in (1, -1):
                ones[0, token] = 1 + sign * small
                with torch.no_grad(), gated(model, {step: ones}):
                    ends.append(model(images)[0, 3])
                ones[0, token] = 1
            measured = (ends[0] - ends[1]) / (2 * small)
            assert slopes[step][0, token].item() == pytest.approx(measured.item(), rel=2e-2, abs=1e-6)
    drops = by_occlusion(model, images, class_score(3), len(counts) - 1, counts[-1])
    assert drops.shape == (counts[-1],)
    assert drops.abs().max() > 0


def test_hooks_are_gone_afterwards():
    model = Weighing(WEIGHTS)
    by_occlusion(model, torch.rand(1, 3, 4, 4), class_score(0), 0, 4)
    assert all(not module._forward_hooks for module in model.modules())


def test_a_segmenter_is_watched_by_its_mean():
    logits = torch.rand(2, 5, 6, 7)
    torch.testing.assert_close(class_score(2)(logits), logits[:, 2].mean((1, 2)))
    with pytest.raises(ValueError, match="gives no class scores"):
        class_logits(torch.rand(2, 3, 4))
    with pytest.raises(ValueError, match="class 9 does not exist: this model has 5"):
        class_score(9)(logits)


def test_tokens_that_are_not_handed_on_cannot_be_taken_away():
    class Silent(Grouping):
        def trace(self, inputs, output):
            return AssignmentTrace(output[1], (4, 4), tokens=output[0].clone())

    model = Weighing(WEIGHTS)
    model.group = Silent()
    with pytest.raises(ValueError, match="Silent does not hand its tokens on"):
        by_occlusion(model, torch.rand(1, 3, 4, 4), class_score(0), 0, 4)
