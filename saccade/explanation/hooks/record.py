"""Record what the grouping modules of a model compute, with forward hooks: `with saccade.record(model) as traces:`."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from saccade.tokens.trace import AssignmentTrace, Trace


class Grouping(Protocol):
    """A module that groups pixels into tokens and can describe one call of itself."""

    def trace(self, inputs: tuple, output: Any) -> Trace: ...


def block_name(module_name: str) -> str:
    """Name of the block that contains a module: "stages.0.blocks.1.attn.tokenizer" -> "stages.0.blocks.1"."""
    name = module_name.replace("_orig_mod.", "")  # torch.compile's wrapper
    block = re.match(r"(.*\.)?\d+(?=\.|$)", name)
    return block.group(0) if block else name


def grouping_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules of `model` with a `trace` method, by name; ValueError if there are none.

    Of timm's ViTs and Swins, which are baselines, the patch embedding: their tokens are patches.
    """
    modules = [(name, module) for name, module in model.named_modules() if hasattr(module, "trace")]
    if not modules:
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, PatchEmbed)]
    if not modules:
        raise ValueError(
            f"expected a model that groups pixels into tokens, got {type(model).__name__}. "
            "Use a saccade model (saccade.list_models()) or one that contains it, or a ViT or Swin of timm; exported "
            "models have no hooks."
        )
    return modules


def trace_call(module: nn.Module, inputs: tuple, output: Any) -> Trace:
    """Trace of one call of a grouping module."""
    if isinstance(module, PatchEmbed):
        return patch_trace(module, inputs[0], output)
    return cast(Grouping, module).trace(inputs, output)  # nn.Module types every unknown attribute as Tensor | Module


def patch_trace(module: PatchEmbed, images: Tensor, output: Tensor) -> AssignmentTrace:
    """Patches as tokens: each is one cell of the grid. `output` is (B, M, D) or (B, rows, columns, D)."""
    size = module.dynamic_feat_size((images.shape[2], images.shape[3]))
    cells = torch.eye(size[0] * size[1], dtype=output.dtype, device=output.device)
    if output.shape[1:-1] not in ((len(cells),), size):
        raise ValueError(f"expected patches (B, {len(cells)}, D) as tokens, got {tuple(output.shape)}.")
    return AssignmentTrace(cells.expand(len(output), -1, -1), size, tokens=output.flatten(1, -2))


def is_recomputation() -> bool:
    """Whether autograd is running this forward: activation checkpointing calls a block's hooks a second time."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def record(model: nn.Module) -> Iterator[list[Trace]]:
    """Collect the traces of every grouping module of `model`, in order of execution.

    Traces keep their autograd graph; use `torch.no_grad()` if you need no gradients. A module that runs several times
    is recorded each time, with `step` counting from 0. Compiled models run eagerly inside the context. Exported and
    scripted models cannot be recorded: they have no modules to hook.

    Example:
        >>> model = saccade.create_model("svit_nano")
        >>> with saccade.record(model) as traces:
        ...     logits = model(torch.rand(1, 3, 64, 64))
        >>> traces[0].name
        'stages.0.blocks.0'
    """
    traces: list[Trace] = []
    calls: Counter[str] = Counter()

    def make_hook(name: str) -> Callable[[nn.Module, tuple, Any], None]:
        def hook(module: nn.Module, inputs: tuple, output: Any) -> None:
            if is_recomputation():
                return
            traces.append(trace_call(module, inputs, output)._replace(name=block_name(name), step=calls[name]))
            calls[name] += 1

        return hook

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in grouping_modules(model):
            stack.callback(module.register_forward_hook(make_hook(name)).remove)
        yield traces
