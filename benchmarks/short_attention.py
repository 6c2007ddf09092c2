"""Attention of short lists on a GPU, ours against the library's (each of its backends), forward and with backward.

python benchmarks/short_attention.py

For every shape the floor: bytes of the fused projection and of the answer, read and written once, over a copy's speed.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.benchmark import measure_ceiling
from saccade.ops.attention import self_attention, self_attention_reference

SHAPES = {  # images, vectors, width, heads
    "SparseFormer-T, focusing": (128, 49, 256, 64),
    "SparseFormer-T, cortex": (128, 49, 512, 64),
    "SViT-S, stage 1": (128, 49, 64, 1),
    "SViT-S, stage 4": (128, 49, 512, 8),
    "sparseformer_nano, cortex": (512, 36, 192, 8),
}
BACKENDS = {
    "library": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def milliseconds(step, repeats: int = 50) -> float:
    """One call in a CUDA graph, so that only the GPU's time counts."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def steps(shape: tuple[int, int, int, int], attend, train: bool):
    images, vectors, width, heads = shape
    qkv = torch.randn(images, vectors, 3 * width, device="cuda", dtype=torch.bfloat16, requires_grad=train)
    g = torch.randn(images, vectors, width, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        mixed = attend(qkv, heads)
        if train:
            torch.autograd.grad(mixed, qkv, g)

    return step


def main() -> None:
    copy = measure_ceiling("cuda", torch.bfloat16).gbytes * 1e9
    for name, shape in SHAPES.items():
        for train in (False, True):
            moved = shape[0] * shape[1] * shape[2] * 2 * (4 if not train else 4 + 8)
            found = {"ours": milliseconds(steps(shape, self_attention, train))}
            for label, backend in BACKENDS.items():
                try:
                    if backend is None:
                        found[label] = milliseconds(steps(shape, self_attention_reference, train))
                        continue
                    with sdpa_kernel(backend):
                        found[label] = milliseconds(steps(shape, self_attention_reference, train))
                except RuntimeError:
                    continue  # not for this shape
            times = ", ".join(f"{label} {1e3 * value:.0f}" for label, value in found.items())
            what = "with backward" if train else "forward"
            print(f"{name}, {what}: floor {1e6 * moved / copy:.0f} µs; {times}", flush=True)


if __name__ == "__main__":
    main()
