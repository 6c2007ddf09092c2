"""Compare super token attention of SViT-S with `unfold`/`fold`, interleaved: `python benchmarks/super_tokens.py`."""

import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from saccade.benchmark import describe_machine, interleave
from saccade.layers.grid import channels_last
from saccade.models.svit import SuperTokenAttention
from saccade.tokens.super_tokens import SuperTokenizer
from tests.tokens.slow_super_tokens import slow_attention

STAGES = ((64, 56, 8, 1), (128, 28, 4, 2))  # width, side of the map, cell, heads at 224 px


def steps(batch: int, train: bool):
    """Return one call of the attention of every stage, fast and slow, on the same weights and inputs."""
    stages = []
    for dim, side, cell, heads in STAGES:
        features = channels_last(torch.randn(batch, dim, side, side)).requires_grad_(train)
        stages.append((SuperTokenAttention(dim, heads, SuperTokenizer(cell)), features))

    def run(attend) -> None:
        with torch.set_grad_enabled(train):
            for module, features in stages:
                output = attend(module, features)
                if train:
                    output.sum().backward()

    return [lambda: run(lambda module, features: module(features)), lambda: run(slow_attention)]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(describe_machine("cpu"))
    for train in (False, True):
        fast, slow = zip(*interleave(steps(8, train), ["cpu", "cpu"], rounds=15), strict=True)
        medians = statistics.median(fast) * 1e3, statistics.median(slow) * 1e3
        what = "forward and backward" if train else "forward"
        print(f"{what}: {medians[0]:.1f} ms against {medians[1]:.1f} ms, {medians[1] / medians[0]:.2f} times faster")
