"""Compare `saccade.ops.self_attention` with every backend of `scaled_dot_product_attention`, on a GPU.

python benchmarks/short_attention.py

The floor is the bytes of the fused projection and of the output at the speed of a copy.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade import ops
from saccade.benchmark import measure_ceiling

SHAPES = {  # images, tokens, width, heads
    "SparseFormer-T, focusing": (128, 49, 256, 64),
    "SparseFormer-T, cortex": (128, 49, 512, 64),
    "SViT-S, stage 1": (128, 49, 64, 1),
    "SViT-S, stage 4": (128, 49, 512, 8),
    "sparseformer_nano, cortex": (512, 36, 192, 8),
}
BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def milliseconds(step, repeats: int = 50) -> float:
    """Return the GPU time of one call, replayed in a CUDA graph."""
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
    images, tokens, width, heads = shape
    qkv = torch.randn(images, tokens, 3 * width, device="cuda", dtype=torch.bfloat16, requires_grad=train)
    g = torch.randn(images, tokens, width, device="cuda", dtype=torch.bfloat16)

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
            times = {"saccade": milliseconds(steps(shape, ops.self_attention, train))}
            for label, backend in BACKENDS.items():
                try:
                    if backend is None:
                        times[label] = milliseconds(steps(shape, ops.self_attention.reference, train))
                        continue
                    with sdpa_kernel(backend):
                        times[label] = milliseconds(steps(shape, ops.self_attention.reference, train))
                except RuntimeError:
                    continue  # not supported for this shape
            text = ", ".join(f"{label} {1e3 * value:.0f}" for label, value in times.items())
            what = "with backward" if train else "forward"
            print(f"{name}, {what}: floor {1e6 * moved / copy:.0f} µs; {text}", flush=True)


if __name__ == "__main__":
    main()
