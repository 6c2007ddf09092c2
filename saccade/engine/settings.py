"""What a run changes in PyTorch for the whole process, and gives back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def settings_kept() -> Iterator[None]:
    """Whether algorithms must repeat exactly, and whether cuDNN tries several: behind this as before it."""
    exact, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(exact, warn_only=warn)
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
