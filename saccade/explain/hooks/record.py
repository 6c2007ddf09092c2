"""`with saccade.record(model) as traces:` listens from outside; forward() never changes."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from saccade.tokens.trace import Trace


def block_name(module_name: str) -> str:
    """The block a module belongs to: "stages.0.blocks.1.attn.tokenizer" -> "stages.0.blocks.1"."""
    name = module_name.replace("_orig_mod.", "")  # the wrapper of torch.compile
    block = re.match(r"(.*\.)?\d+(?=\.|$)", name)
    return block.group(0) if block else name


def reporters(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The grouping steps of `model`, by name."""
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "trace")]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no step that reports tokens. "
            "Use a saccade model (saccade.list_models()), or one that contains it; exported models cannot be recorded."
        )
    return found


@contextmanager
def record(model: nn.Module) -> Iterator[list[Trace]]:
    """Collect what every grouping step of `model` reports, in the order of execution.

    Traces keep their graph, so gradients can be asked of them; use `torch.no_grad()` if you do not need any.
    A module that runs several times reports each time, with `step` counting from 0. Compiled models run eagerly
    inside the context. An exported or scripted model has no modules left to listen to.
    """
    traces: list[Trace] = []
    calls: Counter[str] = Counter()

    def listener(name: str):
        def listen(module: nn.Module, inputs: tuple, output) -> None:
            if torch._C._current_graph_task_id() != -1:  # a checkpointed block, run again by backward
                return
            traces.append(module.trace(inputs, output)._replace(name=block_name(name), step=calls[name]))
            calls[name] += 1

        return listen

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in reporters(model):
            stack.callback(module.register_forward_hook(listener(name)).remove)
        yield traces
