"""Read weight files: safetensors and torch.save. Nothing in a file is executed."""

import mmap
import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from saccade import weights

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # keys under which training scripts store weights
MAX_WRAPPERS = 8  # nested dicts around the weights
PREFIXES = ("module.", "_orig_mod.")


class CheckpointError(ValueError):
    """A file cannot be loaded into this model; the message says why and what to do."""


def weights_file(path: str | os.PathLike) -> Path:
    """The weights of a file, a run's folder (its best), or an embedded name such as "svit_nano.tiny_imagenet"."""
    path = Path(path)
    if path.is_file():
        return path
    if not path.exists():
        if (embedded := weights.find(str(path))) is not None:
            return embedded
        expected = f"a weights file, a run's folder, or one of {', '.join(weights.embedded())}"
        raise CheckpointError(f"no such checkpoint: {path}; expected {expected}.")
    for name in ("best.safetensors", "last.safetensors"):
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"expected best.safetensors or last.safetensors in {path}. Name the weights file instead.")


def read_state_dict(source: str | os.PathLike | Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file or a nested dict; pickled code in a file is not executed."""
    if isinstance(source, Mapping):
        return unwrap(source)
    path = Path(source)
    if not path.is_file():
        raise CheckpointError(f"no such checkpoint: {path}; expected a weights file.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        _check_torch_file(path)
        with torch.serialization.safe_globals([Namespace]):  # training scripts store their arguments, too
            return unwrap(torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            start = file.read(2)
        if start != b"PK" and start[:1] != b"\x80":  # neither torch's zip nor a pickle
            raise CheckpointError(f"{path} is not a checkpoint: expected safetensors or a torch .pth file.") from error
        raise CheckpointError(
            f"{path} contains Python objects besides tensors, and loading them could run code. If you trust it, "
            "re-save its state dict alone (torch.save(model.state_dict(), ...)) where its classes are installed."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # torch.load raises many types for damaged pickles: IndexError, struct.error, ...
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"{path} is damaged or incomplete ({reason}). Download or copy it again.") from error


def _check_torch_file(path: Path) -> None:
    """Refuse what torch.save never writes and a few bytes of which could fill the memory: bytearray(size), deflate."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if any(content.find(name) >= 0 for name in (b"cbuiltins\nbytearray\n", b"c__builtin__\nbytearray\n")):
                    raise CheckpointError(f"{path} contains byte arrays besides tensors. Save its state dict alone.")
        if file.read(2) == b"PK":  # as torch.load decides
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CheckpointError(f"expected an uncompressed torch file, got {path}. Save it with torch.save.")
            if (
                any(entry.file_size != entry.compress_size for entry in entries)
                or sum(entry.file_size for entry in entries) > size
            ):
                raise CheckpointError(f"{path} is damaged: its entries are larger than the file. Download it again.")


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def unwrap(checkpoint: Any) -> dict[str, Tensor]:
    """The tensors under `model`/`state_dict`/`model_ema`, without the prefixes of DDP and torch.compile."""
    for _ in range(MAX_WRAPPERS):  # a pickled dict can contain itself
        if not isinstance(checkpoint, Mapping) or any(isinstance(value, Tensor) for value in checkpoint.values()):
            break
        inner = next((key for key in WRAPPERS if isinstance(checkpoint.get(key), Mapping)), None)
        if inner is None:
            raise CheckpointError(f"no weights found: expected tensors, or one of {WRAPPERS}; got {some(checkpoint)}")
        checkpoint = checkpoint[inner]
    else:
        raise CheckpointError(f"no weights found: expected tensors within {MAX_WRAPPERS} nested dicts.")
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"expected a dict of tensors, got {type(checkpoint).__name__}.")
    state_dict = {str(key): value for key, value in checkpoint.items() if isinstance(value, Tensor)}
    for prefix in PREFIXES:
        state_dict = {key.removeprefix(prefix): value for key, value in state_dict.items()}
    return state_dict


def some(names: Any, count: int = 4) -> str:
    """The first names, and how many there are, for messages."""
    names = [str(name)[:80] for name in names]
    return ", ".join(names[:count]) + (f", ... ({len(names)} in all)" if len(names) > count else "")
