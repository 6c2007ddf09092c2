"""SparseFormer Figs. 3-7: regions, sampling points and their density per step, token responses, perturbed inputs."""

from collections.abc import Sequence
from typing import Literal, Protocol, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from saccade.explanation.drawing.colours import DARK_BRIGHT, colour_scale, token_colours
from saccade.explanation.drawing.density import BANDWIDTH, top_hat
from saccade.explanation.drawing.figure import Figure, Panel
from saccade.explanation.drawing.overlay import blend, draw_boxes, draw_points, rescale, to_grey
from saccade.explanation.images import View
from saccade.explanation.observe import Observation, Step
from saccade.tokens.trace import RegionTrace, expect_trace

PERTURBATIONS = ("erased", "zero padding", "reflection padding")


class TokenClassifier(Protocol):
    """A timm model whose features are tokens (B, M, D)."""

    def forward_features(self, x: Tensor) -> Tensor: ...

    def forward_head(self, x: Tensor) -> Tensor: ...


def sampling_density(step: Step, size: tuple[int, int], bandwidth: float = BANDWIDTH) -> Tensor:
    """Fraction of the points of all tokens near each pixel, (*size)."""
    return top_hat(expect_trace(step.trace, RegionTrace).points[0].flatten(0, 1), size, bandwidth)


def draw_density(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A density (H, W) over the grey image, dark at 0 and bright at the maximum."""
    return blend(to_grey(image), colour_scale(rescale(values, from_zero=True), DARK_BRIGHT), 0.75)


def sampling_figure(observation: Observation, model_name: str) -> Figure:
    """SparseFormer Figs. 3-5: regions, points and density in three rows, a column per step."""
    canvas, steps = observation.view.canvas, observation.steps
    grey = to_grey(canvas)
    rows: list[list[Panel]] = [[], [], []]
    for step in steps:
        trace, colours = expect_trace(step.trace, RegionTrace), token_colours(step.colour_indices)
        points = trace.points[0]  # (M, P, 2)
        regions = draw_boxes(grey, trace.regions[0].cpu().numpy(), colours, width=2)
        sampled = draw_points(grey, points.cpu().numpy(), colours, radius=canvas.shape[1] / 250)
        density = draw_density(canvas, sampling_density(step, canvas.shape[:2]).cpu().numpy())
        inside = float(((points >= 0) & (points <= 1)).all(-1).float().mean())
        rows[0].append(Panel(regions, step.title, f"{step.count} regions"))
        rows[1].append(Panel(sampled, "points", f"{points.shape[1]} per token, {inside:.0%} inside the image"))
        rows[2].append(Panel(density, "density"))
    return Figure(
        "sampling",
        "Regions and sampling points, step by step",
        f"{model_name}, {steps[0].count} tokens. Regions and sampling points in the tokens' colours; below, the "
        f"density of all points (top-hat kernel, radius 1/{round(1 / BANDWIDTH)} of the image).",
        [panel for row in rows for panel in row],
        columns=len(steps),
    )


@torch.no_grad()
def token_responses(model: nn.Module, images: Tensor) -> Tensor:
    """Logits (B, M, K) of every token with a region alone: the head without pooling (SparseFormer Fig. 6)."""
    classifier = cast(TokenClassifier, model)  # nn.Module types every unknown attribute as Tensor | Module
    tokens = classifier.forward_features(images)
    if tokens.ndim != 3:
        raise ValueError(f"expected {type(model).__name__} to end in tokens (B, M, D), got {tuple(tokens.shape)}.")
    tokens = tokens[:, getattr(model, "num_prefix_tokens", 0) :]  # a class token has no region
    logits = classifier.forward_head(tokens.flatten(0, 1).unsqueeze(1))  # (B·M, 1, D): one token per image
    return logits.unflatten(0, tokens.shape[:2])


def top_responses(responses: Tensor, top: int = 5) -> np.ndarray:
    """Indices of the `top` tokens with the highest of the logits (M,)."""
    return responses.argsort(descending=True, stable=True)[:top].cpu().numpy()


def response_figure(
    panels: list[Panel], tokens: np.ndarray, responses: Tensor, class_name: str, model_name: str
) -> Figure:
    """Panels of the tokens with the highest logits for a class, in one row."""
    logits = ", ".join(f"{token} ({float(responses[token]):.2g})" for token in tokens)
    return Figure(
        "responses",
        f"The {len(tokens)} tokens with the highest logits for {class_name}",
        f"{model_name}. Classifier applied to single tokens; highest logits of {len(responses)} tokens: {logits}.",
        panels,
        columns=len(panels),
    )


def image_response_figure(
    observation: Observation, responses: Tensor, class_name: str, model_name: str, top: int = 5
) -> Figure:
    """SparseFormer Fig. 6: regions of the tokens that respond most to a class, per step. responses (M,) are logits."""
    best = top_responses(responses, top)
    panels = []
    for step in observation.steps:
        trace, colours = expect_trace(step.trace, RegionTrace), token_colours(step.colour_indices[best])
        drawn = draw_boxes(
            observation.view.canvas, trace.regions[0].cpu().numpy()[best], colours, width=3, outline=True
        )
        panels.append(Panel(draw_points(drawn, trace.points[0].cpu().numpy()[best], colours, 2.0), step.title))
    return response_figure(panels, best, responses, class_name, model_name)


def perturb(view: View, kind: str, seed: int = 0) -> View:
    """A perturbed copy (SparseFormer Fig. 7): a third erased, or at half size with zero or reflection padding."""

    def change(image: np.ndarray) -> np.ndarray:
        if kind == "erased":
            return _erase(image, np.random.default_rng(seed))
        return _pad(image, "constant" if kind == "zero padding" else "reflect")

    if kind not in PERTURBATIONS:
        raise ValueError(f"expected one of {', '.join(PERTURBATIONS)}, got {kind!r}.")
    image = (view.image.permute(1, 2, 0).cpu().numpy() * 255).round().astype(np.uint8)
    changed = torch.from_numpy(change(image)).permute(2, 0, 1).float() / 255
    return View(f"{view.name}, {kind}", changed, change(view.canvas))


def perturbed_figure(observations: Sequence[Observation], model_name: str) -> Figure:
    """SparseFormer Fig. 7: density per step, a row for the image and each of its perturbed copies."""
    panels = []
    for observation in observations:
        canvas = observation.view.canvas
        panels.append(Panel(canvas, observation.view.name))
        for step in observation.steps:
            density = sampling_density(step, canvas.shape[:2]).cpu().numpy()
            panels.append(Panel(draw_density(canvas, density), step.title))
    return Figure(
        "perturbed",
        "Sampling density of perturbed images",
        f"{model_name}, {observations[0].steps[0].count} tokens. Density of all sampling points per step, for the "
        "original image, a partly erased one, and the image at half size with zero padding and reflection padding.",
        panels,
        columns=len(observations[0].steps) + 1,
    )


def _erase(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Set a random rectangle of a third of the area to black."""
    height, width = image.shape[:2]
    tall = rng.uniform(0.45, 0.75)
    wide = 1 / 3 / tall
    top, left = rng.uniform(0, 1 - tall), rng.uniform(0, 1 - wide)
    erased = image.copy()
    erased[round(top * height) : round((top + tall) * height), round(left * width) : round((left + wide) * width)] = 0
    return erased


def _pad(image: np.ndarray, mode: Literal["constant", "reflect"]) -> np.ndarray:
    """The image at half its size, padded to its original size."""
    height, width = image.shape[:2]
    tall, wide = -(-height // 2), -(-width // 2)
    half = np.array(Image.fromarray(image).resize((wide, tall), Image.Resampling.BICUBIC))
    top, left = (height - tall) // 2, (width - wide) // 2
    return np.pad(half, ((top, height - tall - top), (left, width - wide - left), (0, 0)), mode=mode)
