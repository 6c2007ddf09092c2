"""Options of torch.compile that help these models: `torch.compile(model, **compile_options("reduce-overhead"))`."""

from typing import Any

import torch

# Independent small pointwise kernels in one launch: under autocast a model casts hundreds of weights per call, in
# launches that take longer than the work in them.
COMBO_KERNELS = {"combo_kernels": True, "combo_kernels_pointwise_only": True}


def compile_options(mode: str | None = None) -> dict[str, Any]:
    """Arguments of torch.compile for one of its modes, with combo kernels where Inductor and a GPU support them."""
    import torch._inductor as inductor  # slow to import
    import torch._inductor.config as config

    supported = all(hasattr(config, name) for name in COMBO_KERNELS)
    if not torch.cuda.is_available() or not supported:
        return {"mode": mode}
    return {"options": inductor.list_mode_options(mode or "default") | COMBO_KERNELS}
