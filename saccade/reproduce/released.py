"""The authors' released weights on the papers' own data: printed against measured accuracy."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saccade.engine.evaluate import evaluate
from saccade.reproduce.claim import ClaimError, Released
from saccade.tasks.released import fetch_release
from saccade.weights.releases import Release, find


def find_release(name: str) -> Release:
    release = find(name)
    if release is None or not release.accuracy.endswith(" top-1"):
        raise ClaimError(f"expected released weights with a printed top-1, got {name}.")
    return release


def evaluate_released(
    claim: Released,
    data: str,
    device: str,
    batch_size: int = 64,
    workers: int | None = None,
    dtype: torch.dtype | None = None,
    limit: int | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Download and evaluate every file of a comparison by the papers' protocol (the card's size and crop)."""
    rows = []
    for label, name in claim.weights.items():
        release = find_release(name)
        report = partial(on_progress, name) if on_progress else None
        metrics = evaluate(
            fetch_release(release), data, batch_size=batch_size, workers=workers, device=device, dtype=dtype,
            limit=limit, on_progress=report,
        )  # fmt: skip
        printed = float(release.accuracy.removesuffix(" top-1"))
        row = {"label": label, "weights": name, "printed": printed, "top1": metrics["top1"], "count": metrics["count"]}
        rows.append(row | {"difference": round(metrics["top1"] - printed, 4), "note": release.note or None})
    return {
        "claim": claim.name,
        "paper": claim.paper,
        "table": claim.table,
        "statement": claim.statement,
        "data": Path(data).name,
        "rows": rows,
    }
