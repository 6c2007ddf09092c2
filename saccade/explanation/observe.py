"""One image through one model: traces, map alignment and attention of a single forward pass."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from saccade.data.transforms.batch import normalize
from saccade.explanation.drawing.alignment import Alignment, record_alignment, resample_maps
from saccade.explanation.drawing.colours import colour_indices, stage_name, token_colour
from saccade.explanation.drawing.density import gaussian_maps, top_hat
from saccade.explanation.hooks.attention import Attention, record_attention
from saccade.explanation.hooks.record import record
from saccade.explanation.images import View
from saccade.tokens.trace import AssociationTrace, RegionTrace, Trace, TubeTrace, num_tokens

CHUNK = 64  # tokens whose full-size maps are in memory at the same time


class Step(NamedTuple):
    """One recorded step of one image, with everything a figure needs."""

    trace: Trace  # batch size 1
    index: int  # position in the list of `record`
    title: str  # "stage 2, block 5"
    alignment: Alignment  # of the map with the image
    colour_indices: np.ndarray  # (M,), one per token
    attention: Attention | None  # first attention call whose keys are this step's tokens
    image_size: tuple[int, int]  # of the model's input

    @property
    def count(self) -> int:
        """Number of tokens."""
        return num_tokens(self.trace)

    def colour(self, token: int) -> tuple[int, int, int]:
        """Colour of a token."""
        return token_colour(int(self.colour_indices[token]))

    @property
    def array_key(self) -> str:
        """Name of the step among the arrays of an explanation."""
        return array_key(self.trace)

    def maps(
        self, size: tuple[int, int], tokens: Sequence[int] | Tensor | None = None, bandwidth: float | None = None
    ) -> Tensor:
        """Maps of all or some tokens, aligned with the image and resampled to `size` pixels: (M, *size).

        The map of a region is the Gaussian of its points, or their top-hat density if a `bandwidth` is given.
        """
        indices = torch.as_tensor(range(self.count) if tokens is None else tokens)
        if isinstance(self.trace, RegionTrace):
            points = self.trace.points[0, indices]
            return gaussian_maps(points, size) if bandwidth is None else top_hat(points, size, bandwidth)
        if isinstance(self.trace, AssociationTrace):
            maps = super_token_maps(self.trace, indices)
        else:
            maps = self.trace.maps()[0, indices].float()
        return resample_maps(maps, self.alignment, self.image_size, size)

    def map_chunks(self, size: tuple[int, int], bandwidth: float | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Maps of CHUNK tokens at a time on the CPU, with the slice of the tokens, to bound memory."""
        for start in range(0, self.count, CHUNK):
            tokens = range(start, min(start + CHUNK, self.count))
            yield slice(tokens.start, tokens.stop), self.maps(size, tokens, bandwidth).cpu()


class Observation(NamedTuple):
    """Output and recorded steps of a model for one image."""

    view: View
    output: Any
    steps: list[Step]

    @property
    def main(self) -> list[Step]:
        """Every step if there are at most 4 or the tokens persist (SparseFormer), else the last step of each stage."""
        if len(self.steps) <= 4 or isinstance(self.steps[0].trace, RegionTrace):
            return self.steps
        return list({stage_name(step.trace): step for step in self.steps}.values())


@torch.no_grad()
def observe(model: nn.Module, view: View, mean: Sequence[float], std: Sequence[float]) -> Observation:
    """Run the model in eval mode on one view; its training modes and hooks are restored."""
    images = normalize(view.image[None], mean, std).to(next(model.parameters()))  # its device and dtype
    size = view.image.shape[-2], view.image.shape[-1]
    with (
        eval_mode(model),
        record(model) as traces,
        record_alignment(model, size) as alignments,
        record_attention(model, traces) as calls,
    ):
        output = model(images)
    if any(isinstance(trace, TubeTrace) for trace in traces):
        raise TypeError("expected an image model, got a video model. Use explain_clip.")
    colours = colour_indices(traces)
    steps = []
    for i, trace in enumerate(traces):
        count = num_tokens(trace)
        attention = next((call for call in calls if call.num_traces == i + 1 and call.weights.shape[-1] == count), None)
        map_size = trace.size[-2], trace.size[-1]
        alignment = alignments.get(map_size) or Alignment.stretched(map_size, size)
        steps.append(Step(trace, i, step_title(trace, traces), alignment, colours[i], attention, size))
    return Observation(view, output, steps)


class eval_mode:
    """Context manager: the model in eval mode inside, each module's own mode restored afterwards."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __enter__(self) -> None:
        self.training = [module for module in self.model.modules() if module.training]
        self.model.eval()

    def __exit__(self, *_: Any) -> None:
        for module in self.training:
            module.training = True


def step_title(trace: Trace, traces: Sequence[Trace]) -> str:
    """Readable name of a trace: "stage 2, block 5", "step 3 of 5"."""
    if isinstance(trace, (RegionTrace, TubeTrace)):
        return f"step {[t is trace for t in traces].index(True) + 1} of {len(traces)}"
    match = re.fullmatch(r"(?:.*\.)?stages\.(\d+)\.blocks\.(\d+)", trace.name)
    if match:
        return f"stage {int(match[1]) + 1}, block {int(match[2]) + 1}"
    match = re.fullmatch(r"(?:.*\.)?(\w+)\.(\d+)", trace.name)
    title = f"{match[1].rstrip('s')} {int(match[2]) + 1}" if match else trace.name or "tokens"
    return f"{title}, step {trace.step + 1}" if trace.step else title


def step_summary(trace: Trace, title: str) -> dict[str, Any]:
    """Name, title, token count and grid of a step, for JSON."""
    return {
        "name": trace.name,
        "step": trace.step,
        "title": title,
        "tokens": num_tokens(trace),
        "grid": list(trace.size),
    }


def array_key(trace: Trace) -> str:
    """Name of a trace among the arrays: its block, and the number of the call if it runs several times."""
    return trace.name + (f".{trace.step}" if trace.step else "")


def super_token_indices(trace: AssociationTrace) -> Tensor:
    """(H, W, 9): indices of the nine super tokens of each pixel's association, -1 for those outside the grid."""
    (height, width), (rows, columns) = trace.size, trace.grid
    device = trace.association.device
    neighbour = torch.arange(9, device=device)
    row = (torch.arange(height, device=device) // trace.cell)[:, None, None] + neighbour // 3 - 1
    column = (torch.arange(width, device=device) // trace.cell)[None, :, None] + neighbour % 3 - 1
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return torch.where(inside, row * columns + column, -1)


def super_token_maps(trace: AssociationTrace, tokens: Tensor) -> Tensor:
    """`trace.maps()[0, tokens]` without the maps of the other tokens, of which a large image has thousands."""
    indices, association = super_token_indices(trace), trace.association[0].float().unflatten(0, trace.size)
    return torch.stack([torch.where(indices == token, association, 0.0).sum(2) for token in tokens.tolist()])
