"""Capture the kernels of one batch in a CUDA graph and replay them without Python."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade import ops

WARM_UP = 3  # calls before the capture: Triton compiles, cuDNN selects algorithms, the allocator fills


class GraphKey(NamedTuple):
    """What a captured graph depends on besides the values of the images."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None

    def __str__(self) -> str:
        autocast = f" with autocast to {self.autocast}" if self.autocast else ""
        return f"{self.shape} {self.dtype} on {self.device}{autocast}"


def graph_key(images: Tensor) -> GraphKey:
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return GraphKey(tuple(images.shape), images.dtype, images.device, autocast)


class CudaGraph(nn.Module):
    """`model` captured at its first batch; later batches must have the same shape, dtype and device.

    Every call copies the images in, replays the graph, and returns a copy of the output. The memory of one batch stays
    reserved as long as this object lives; `reset` frees it and allows another shape.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        device = next((value.device for value in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
        if device.type != "cuda":
            raise ValueError(
                f"expected a model on a CUDA device, got one on {device.type}. Move it first, or use cuda_graph=False."
            )
        self.model = model
        self.reset()

    def reset(self) -> None:
        """Free the captured graph and its memory."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._images = self._output = torch.empty(0)
        self._key: GraphKey | None = None

    def train(self, mode: bool = True) -> "CudaGraph":
        if mode:
            raise RuntimeError("a captured model cannot be trained: train the original and optimize it again.")
        return super().train(False)

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> the model's output, one tensor."""
        key = graph_key(images)
        if self._graph is None:
            self._capture(images, key)
        elif key != self._key:
            raise ValueError(
                f"expected images of {self._key}, as captured, got {key}. Pad the batch, call reset(), or use one "
                "optimized copy per shape."
            )
        assert self._graph is not None
        self._images.copy_(images)
        self._graph.replay()
        return self._output.clone()

    def _capture(self, images: Tensor, key: GraphKey) -> None:
        if images.device.type != "cuda":
            raise ValueError(f"expected images on a CUDA device, got {images.device.type}. Use images.cuda().")
        self._images = images.clone()
        stream = torch.cuda.Stream(images.device)
        stream.wait_stream(torch.cuda.current_stream(images.device))
        with torch.cuda.stream(stream), ops.fixed_shapes():
            for _ in range(WARM_UP):
                output = self.model(self._images)
        torch.cuda.current_stream(images.device).wait_stream(stream)
        if not isinstance(output, Tensor):
            raise TypeError(f"expected a model that returns one tensor, got {type(output).__name__}.")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), ops.fixed_shapes():
            self._output = self.model(self._images)
        self._graph, self._key = graph, key
