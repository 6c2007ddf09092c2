"""SparseFormer, Figures 3 to 7: where tokens look, step by step, which of them answer, and what disturbs them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from saccade.explain.drawing.colours import DARK_BRIGHT, colour_scale, token_colours
from saccade.explain.drawing.density import BANDWIDTH, top_hat
from saccade.explain.drawing.figure import Figure, Panel
from saccade.explain.drawing.overlay import blend, boxes, dots, scale_to_one, to_grey
from saccade.explain.images import View
from saccade.explain.observe import Observation, Step

DISTURBANCES = ("erased", "zero padding", "reflection")


def density(step: Step, size: tuple[int, int], bandwidth: float = BANDWIDTH) -> Tensor:
    """Where all tokens look together: share of all points near each pixel, (*size)."""
    return top_hat(step.trace.points[0].flatten(0, 1), size, bandwidth)


def density_picture(picture: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Dark where nobody looks, bright where most points are, over the grey picture."""
    return blend(to_grey(picture), colour_scale(scale_to_one(values, from_zero=True), DARK_BRIGHT), 0.75)


def looking_figure(seen: Observation, model_name: str) -> Figure:
    """Figures 3 to 5 (SF-76, SF-77): regions, points and density in three rows, a column for every step."""
    picture, steps = seen.view.picture, seen.steps
    ground = to_grey(picture)
    rows: list[list[Panel]] = [[], [], []]
    for step in steps:
        colours = token_colours(step.numbers)
        regions = boxes(ground, step.trace.regions[0].cpu().numpy(), colours, width=2)
        points = dots(ground, step.trace.points[0].cpu().numpy(), colours, radius=picture.shape[1] / 250)
        looks = density_picture(picture, density(step, picture.shape[:2]).cpu().numpy())
        inside = step.trace.points[0]
        share = float(((inside >= 0) & (inside <= 1)).all(-1).float().mean())
        rows[0].append(Panel(regions, step.title, f"{step.count} regions"))
        rows[1].append(Panel(points, "points", f"{inside.shape[1]} a token, {share:.0%} inside"))
        rows[2].append(Panel(looks, "density"))
    return Figure(
        "looking",
        "Where the tokens look, step by step",
        f"{model_name}, {steps[0].count} tokens. Regions and sampling points in the tokens' colours; below, the "
        f"density of all points (top-hat kernel, radius 1/{round(1 / BANDWIDTH)} of the image).",
        [panel for row in rows for panel in row],
        columns=len(steps),
    )


@torch.no_grad()
def token_responses(model: nn.Module, images: Tensor) -> Tensor:
    """Logits (B, M, K) of every token alone: the model's head without the mean over tokens (SF-78)."""
    tokens = model.forward_features(images)
    if tokens.ndim != 3:
        raise ValueError(f"{type(model).__name__} ends in features {tuple(tokens.shape)}, not in tokens (B, M, D).")
    logits = model.forward_head(tokens.flatten(0, 1).unsqueeze(1))  # every token an image of one token
    return logits.unflatten(0, tokens.shape[:2])


def responding_figure(seen: Observation, responses: Tensor, answer: str, model_name: str, top: int = 5) -> Figure:
    """Figure 6: regions of the tokens that respond most to a class, over the steps. responses (M,) are their logits."""
    best = responses.argsort(descending=True, stable=True)[:top].cpu()
    picture = seen.view.picture
    panels = []
    for step in seen.steps:
        colours = token_colours(step.numbers[best.numpy()])
        regions = step.trace.regions[0, best].cpu().numpy()
        drawn = boxes(picture, regions, colours, width=3, rim=True)
        panels.append(Panel(dots(drawn, step.trace.points[0, best].cpu().numpy(), colours, 2.0), step.title))
    tokens = ", ".join(f"{int(token)} ({responses[token]:.2g})" for token in best)
    return Figure(
        "responding",
        f"The {len(best)} tokens that answer {answer}",
        f"{model_name}. The classifier on single tokens: highest logits of {len(responses)} tokens, {tokens}.",
        panels,
        columns=len(panels),
    )


def disturb(view: View, kind: str, seed: int = 0) -> View:
    """A disturbed copy (SF-79): a third of the picture erased, or half its size with black or mirrored surroundings."""
    change = {"erased": _erase, "zero padding": _surround("constant"), "reflection": _surround("reflect")}[kind]
    picture = change(view.picture, np.random.default_rng(seed))
    image = (view.image.permute(1, 2, 0).cpu().numpy() * 255).round().astype(np.uint8)
    seen = change(image, np.random.default_rng(seed))
    return View(f"{view.name}, {kind}", torch.from_numpy(seen).permute(2, 0, 1).float() / 255, picture)


def disturbed_figure(seen: Sequence[Observation], model_name: str) -> Figure:
    """Figure 7: density maps of the picture and of its disturbed copies, a row each."""
    panels = []
    for one in seen:
        panels.append(Panel(one.view.picture, one.view.name))
        for step in one.steps:
            values = density(step, one.view.picture.shape[:2]).cpu().numpy()
            panels.append(Panel(density_picture(one.view.picture, values), step.title))
    return Figure(
        "disturbed",
        "Where the tokens look when the picture is disturbed",
        f"{model_name}, {seen[0].steps[0].count} tokens. Density of all sampling points over the steps, for the "
        "picture as it is, partly erased, and surrounded by black or by its mirror image.",
        panels,
        columns=len(seen[0].steps) + 1,
    )


def _erase(picture: np.ndarray, random: np.random.Generator) -> np.ndarray:
    height, width = picture.shape[:2]
    tall = random.uniform(0.45, 0.75)
    wide = 1 / 3 / tall
    top, left = random.uniform(0, 1 - tall), random.uniform(0, 1 - wide)
    erased = picture.copy()
    erased[round(top * height) : round((top + tall) * height), round(left * width) : round((left + wide) * width)] = 0
    return erased


def _surround(mode: str) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    def change(picture: np.ndarray, _: np.random.Generator) -> np.ndarray:
        height, width = picture.shape[:2]
        tall, wide = -(-height // 2), -(-width // 2)
        half = np.array(Image.fromarray(picture).resize((wide, tall), Image.Resampling.BICUBIC))
        top, left = (height - tall) // 2, (width - wide) // 2
        around = ((top, height - tall - top), (left, width - wide - left), (0, 0))
        return np.pad(half, around, mode=mode)

    return change
