"""Reading the parity kits: what the authors' implementations compute, and how close is close enough."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.fill import fill, image, noise

FOLDER = Path(__file__).parent
INPUTS = {"224": ((2, 3, 224, 224), 0), "160x256": ((1, 3, 160, 256), 1), "250x190": ((1, 3, 250, 190), 2)}
FLOAT64 = 1e-9  # relative to the largest value of the entry; the kit calls this generous


@cache
def golden(variant: str) -> dict[str, Tensor]:
    return load_file(FOLDER / variant / "golden64.safetensors")


@cache
def keys(variant: str) -> list:
    return json.loads((FOLDER / variant / "keys.json").read_text())


def weights(variant: str) -> dict[str, Tensor]:
    return fill(keys(variant))


def images(size: str) -> Tensor:
    return image(*INPUTS[size]).double()


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value of the entry."""
    assert actual.shape == expected.shape
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def summary(name: str, value: Tensor) -> dict[str, Tensor]:
    """The three entries a kit keeps of a large tensor; `value` is (B, C, H, W) or (B, N, C)."""
    first = value[0].contiguous()
    cut = first[:8, :8, :8] if first.ndim == 3 else first[:8, :8]
    spread = first.flatten()[torch.arange(64) * first.numel() // 64]
    return {f"{name}/stats": torch.stack([value.mean(), value.std()]), f"{name}/slice": cut, f"{name}/spread": spread}


def check_summary(variant: str, name: str, value: Tensor, tolerance: float = FLOAT64) -> None:
    for entry, actual in summary(name, value).items():
        assert error(actual, golden(variant)[entry]) <= tolerance, entry


def loss(logits: Tensor) -> Tensor:
    """What the kits differentiate."""
    return (logits * noise("loss", logits.shape).to(logits.dtype) / 100).sum()


def official_names(variant: str, convert) -> dict[str, str]:
    """Our tensor's name -> the official one it comes from, found by converting a dict of labelled tensors."""
    rows = [(name, shape) for name, shape, _, _ in keys(variant)]
    labelled = {name: torch.full(shape, i, dtype=torch.float64) for i, (name, shape) in enumerate(rows)}
    return {ours: rows[int(value.flatten()[0])][0] for ours, value in convert(labelled).items()}


def gradient_norms(variant: str, entry: str = "grad") -> dict[str, float]:
    """Official parameter -> norm of its gradient; frozen ones and rounding noise left out, as the kit advises."""
    names = [name for name, _, _, kind in keys(variant) if kind == "param"]
    norms = golden(variant)[f"{entry}/params"]
    keep = norms > 1e-6 * norms[~norms.isnan()].max()
    return {name: norm.item() for name, norm, valid in zip(names, norms, keep, strict=True) if valid}
