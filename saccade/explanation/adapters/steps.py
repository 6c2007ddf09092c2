"""One recorded step of a batch of images, image by image, for the adapters."""

import numpy as np
import torch
from torch import Tensor, nn

from saccade.explanation.drawing.alignment import Alignment, record_alignment
from saccade.explanation.hooks.record import record
from saccade.explanation.observe import Step, eval_mode, step_title
from saccade.tokens.trace import Trace, TubeTrace, num_tokens


@torch.no_grad()
def record_step(model: nn.Module, images: Tensor, step: int = -1) -> tuple[int, list[Step], list[int]]:
    """Run the model in eval mode on prepared images (B, C, H, W): index of the step, one Step per image, and the
    number of tokens of every step."""
    size = images.shape[-2], images.shape[-1]
    with eval_mode(model), record(model) as traces, record_alignment(model, size) as alignments:
        model(images)
    if any(isinstance(trace, TubeTrace) for trace in traces):
        raise TypeError("expected an image model, got a video model. Use saccade.explain for clips.")
    if not -len(traces) <= step < len(traces):
        raise ValueError(f"expected a step from {-len(traces)} to {len(traces) - 1}, got {step}.")
    index = step % len(traces)
    trace = traces[index]
    grid = trace.size[-2], trace.size[-1]
    alignment = alignments.get(grid) or Alignment.stretched(grid, size)
    title, colours = step_title(trace, traces), np.arange(num_tokens(trace))
    steps = [Step(image_trace(trace, i), index, title, alignment, colours, None, size) for i in range(images.shape[0])]
    return index, steps, [num_tokens(trace) for trace in traces]


def image_trace(trace: Trace, index: int) -> Trace:
    """The trace of one image of the batch, with batch size 1."""
    tensors = {name: value[index : index + 1] for name, value in trace._asdict().items() if isinstance(value, Tensor)}
    return trace._replace(**tensors)
