"""How models are compiled here: `torch.compile(model, **compiling("reduce-overhead"))`."""

from typing import Any

import torch

# Small steps that do not wait for one another, in one launch. A model under autocast casts its weights, hundreds of
# them, at every call, in launches that take longer than the work in them.
TOGETHER = {"combo_kernels": True, "combo_kernels_pointwise_only": True}


def compiling(mode: str | None = None) -> dict[str, Any]:
    """Arguments of torch.compile for one of its modes, with what else helps on GPUs where this PyTorch knows it."""
    import torch._inductor as inductor  # takes its time, so only where something is compiled

    known = all(hasattr(inductor.config, name) for name in TOGETHER)
    if not torch.cuda.is_available() or not known:
        return {"mode": mode}
    return {"options": inductor.list_mode_options(mode or "default") | TOGETHER}
