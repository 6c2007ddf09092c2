"""The launches of one batch recorded on the GPU and replayed: a model of many small steps then waits for no Python."""

import torch
from torch import Tensor, nn

WARM_UP = 3  # calls before recording: Triton compiles, cuDNN chooses, allocators fill


class CudaGraph(nn.Module):
    """`model` with its launches recorded at the first batch; later batches must have its shape, type and device.

    Every call copies the images in, replays, and gives back a copy of the answer, so that answers may be kept. The
    memory of one batch stays reserved as long as this object lives; `reset` frees it and lets another shape in.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        device = next((value.device for value in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
        if device.type != "cuda":
            raise ValueError(
                f"a CUDA graph needs a model on a CUDA device, this one is on {device.type}: "
                "move it there first, or leave cuda_graph=False."
            )
        self.model = model
        self.reset()

    def reset(self) -> None:
        """Forget the recording."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._images = self._answer = torch.empty(0)
        self._circumstances: tuple = ()

    def train(self, mode: bool = True) -> "CudaGraph":
        if mode:
            raise RuntimeError("a recorded model cannot be trained: train the original and optimise it again.")
        return super().train(False)

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) -> what the model answers, one tensor."""
        now = circumstances(images)
        if self._graph is None:
            self._record(images, now)
        elif now != self._circumstances:
            raise ValueError(
                f"this CUDA graph was recorded for {describe(self._circumstances)}, and got {describe(now)}. Pad the "
                "batch, call reset(), or keep one optimised copy for each shape."
            )
        assert self._graph is not None
        self._images.copy_(images)
        self._graph.replay()
        return self._answer.clone()

    def _record(self, images: Tensor, now: tuple) -> None:
        if images.device.type != "cuda":
            raise ValueError(f"a CUDA graph reads images on the GPU, these are on {images.device.type}: images.cuda().")
        self._images = images.clone()
        side = torch.cuda.Stream(images.device)
        side.wait_stream(torch.cuda.current_stream(images.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                answer = self.model(self._images)
        torch.cuda.current_stream(images.device).wait_stream(side)
        if not isinstance(answer, Tensor):
            raise TypeError(f"a CUDA graph answers with one tensor, this model with a {type(answer).__name__}.")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._answer = self.model(self._images)
        self._graph, self._circumstances = graph, now


def circumstances(images: Tensor) -> tuple:
    """What a recording depends on besides the numbers in the images."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return tuple(images.shape), images.dtype, images.device, autocast


def describe(now: tuple) -> str:
    shape, dtype, device, autocast = now
    return f"{tuple(shape)} {dtype} on {device}" + (f" with autocast to {autocast}" if autocast else "")
