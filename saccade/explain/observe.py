"""One picture through one model, with every ear open: traces, places, attention, in a single forward pass."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from saccade.explain.drawing.alignment import Place, draw_maps, places
from saccade.explain.drawing.colours import colour_numbers, num_tokens, stage
from saccade.explain.drawing.density import areas, top_hat
from saccade.explain.hooks.attention import Attention, attentions
from saccade.explain.hooks.record import record
from saccade.explain.images import View
from saccade.tokens.trace import AssociationTrace, RegionTrace, Trace


class Step(NamedTuple):
    """One recorded step of one picture, with all that drawing needs."""

    trace: Trace  # batch axis of 1
    index: int  # as `record` counts
    title: str  # "stage 2, block 5"
    place: Place  # of its map in the image
    numbers: np.ndarray  # colour number of each token
    attention: Attention | None  # the first in which its tokens are the keys
    image: tuple[int, int]  # size of what the model saw

    @property
    def count(self) -> int:
        return num_tokens(self.trace)

    def maps(
        self, size: tuple[int, int], tokens: Sequence[int] | Tensor | None = None, bandwidth: float | None = None
    ) -> Tensor:
        """Maps of all or some tokens, drawn at `size` pixels, where they lie in the image: (M, *size).

        Of a region it is the area around its points, or their density if a `bandwidth` is given.
        """
        chosen = torch.as_tensor(range(self.count) if tokens is None else tokens)
        if isinstance(self.trace, RegionTrace):
            points = self.trace.points[0, chosen]
            return areas(points, size) if bandwidth is None else top_hat(points, size, bandwidth)
        if isinstance(self.trace, AssociationTrace):
            return draw_maps(super_token_maps(self.trace, chosen), self.place, self.image, size)
        return draw_maps(self.trace.maps()[0, chosen].float(), self.place, self.image, size)


class Observation(NamedTuple):
    """What a model said and did about one picture."""

    view: View
    output: Any
    steps: list[Step]

    @property
    def main(self) -> list[Step]:
        """All steps if they are few or if the same tokens live through them, else the last of every stage."""
        if len(self.steps) <= 4 or isinstance(self.steps[0].trace, RegionTrace):
            return self.steps
        return list({stage(step.trace): step for step in self.steps}.values())


@torch.no_grad()
def observe(model: nn.Module, view: View, mean: Sequence[float], std: Sequence[float]) -> Observation:
    """Run the model in eval mode on one view; the model is left as it was."""
    images = normalise(view.image[None], mean, std).to(next(model.parameters()))  # its device and its type
    size = view.image.shape[-2], view.image.shape[-1]
    with evaluating(model), record(model) as traces, places(model, size) as found, attentions(model, traces) as calls:
        output = model(images)
    numbers = colour_numbers(traces)
    steps = []
    for i, trace in enumerate(traces):
        count = num_tokens(trace)
        attention = next((call for call in calls if call.after == i + 1 and call.weights.shape[-1] == count), None)
        place = found.get(trace.size) or Place.stretched(trace.size, size)
        steps.append(Step(trace, i, title_of(trace, traces), place, numbers[i], attention, size))
    return Observation(view, output, steps)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pictures (B, C, H, W) or clips (B, C, T, H, W) in [0, 1] as the model was trained to see them.

    Grey models get the mean of the colours.
    """
    if len(mean) == 1:
        images = images.mean(1, keepdim=True)
    shape = (1, -1, *[1] * (images.ndim - 2))
    middle, spread = (torch.tensor(values, device=images.device).view(shape) for values in (mean, std))
    return (images - middle) / spread


class evaluating:
    """`with evaluating(model):` eval mode inside, each module's own mode again afterwards."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __enter__(self) -> None:
        self.training = [module for module in self.model.modules() if module.training]
        self.model.eval()

    def __exit__(self, *_: Any) -> None:
        for module in self.training:
            module.training = True


def title_of(trace: Trace, traces: list[Trace]) -> str:
    """A trace in words: "stage 2, block 5", "step 3 of 5"."""
    if isinstance(trace, RegionTrace):
        return f"step {[t is trace for t in traces].index(True) + 1} of {len(traces)}"
    found = re.fullmatch(r"(?:.*\.)?stages\.(\d+)\.blocks\.(\d+)", trace.name)
    if found:
        return f"stage {int(found[1]) + 1}, block {int(found[2]) + 1}"
    found = re.fullmatch(r"(?:.*\.)?(\w+)\.(\d+)", trace.name)
    words = f"{found[1].rstrip('s')} {int(found[2]) + 1}" if found else trace.name or "tokens"
    return f"{words}, step {trace.step + 1}" if trace.step else words


def super_token_numbers(trace: AssociationTrace) -> Tensor:
    """(H, W, 9): the numbers of the nine tokens that a pixel's shares belong to, -1 for those outside the map."""
    (height, width), (rows, columns) = trace.size, trace.grid
    device = trace.association.device
    step = torch.arange(9, device=device)
    row = (torch.arange(height, device=device) // trace.cell)[:, None, None] + step // 3 - 1
    column = (torch.arange(width, device=device) // trace.cell)[None, :, None] + step % 3 - 1
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return torch.where(inside, row * columns + column, -1)


def super_token_maps(trace: AssociationTrace, tokens: Tensor) -> Tensor:
    """What `trace.maps()[0, tokens]` gives, without the maps of all the others: a large image has thousands."""
    numbers, shares = super_token_numbers(trace), trace.association[0].float().unflatten(0, trace.size)
    return torch.stack([torch.where(numbers == token, shares, 0.0).sum(2) for token in tokens.tolist()])


def one_image(trace: Trace, item: int) -> Trace:
    """The trace of one image of a batch, with a batch axis of 1."""
    return trace._replace(
        **{name: value[item : item + 1] for name, value in trace._asdict().items() if isinstance(value, Tensor)}
    )
