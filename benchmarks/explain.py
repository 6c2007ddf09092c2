"""Measure the overhead of `saccade.record` on one 224 px image, interleaved with the plain forward pass.

`python benchmarks/explain.py [MODEL ...]`
"""

import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import saccade
from saccade.benchmark import describe_machine, interleave
from saccade.explanation.drawing.alignment import record_alignment
from saccade.explanation.hooks.attention import record_attention


def steps(name: str, size: int = 224):
    """Return the forward pass plain, with traces, and with all that figures need."""
    model = saccade.create_model(name).eval()
    images = torch.randn(1, 3, size, size)

    def plain() -> None:
        model(images)

    def traced() -> None:
        with saccade.record(model):
            model(images)

    def everything() -> None:
        with saccade.record(model) as traces, record_attention(model, traces), record_alignment(model, (size, size)):
            model(images)

    return [plain, traced, everything]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(describe_machine("cpu"))
    for name in sys.argv[1:] or ["svit_small"]:
        with torch.no_grad():
            times = list(zip(*interleave(steps(name), ["cpu"] * 3, rounds=15), strict=True))
        medians = [statistics.median(each) for each in times]
        ratios = [statistics.median(b / a for a, b in zip(times[0], each, strict=True)) for each in times]
        print(
            f"{name}: {medians[0] * 1e3:.1f} ms plain, {ratios[1]:.2f} times with traces, "
            f"{ratios[2]:.2f} times with attention and points too"
        )
