"""The authors' released files: downloaded on first use, converted, cached as safetensors with a card.

`releases.py` lists them. Nothing in a file is executed, every tensor is accounted for, and a file that fails
leaves nothing in the cache.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saccade.models.card import Card, preprocess_of, save_model
from saccade.models.checkpoint import match_checkpoint
from saccade.models.registry import create_model
from saccade.weights.download import DownloadError, check_pin, download, home, locked, sha256
from saccade.weights.read import CheckpointError, read_state_dict
from saccade.weights.releases import Release, cached_file

Builder = Callable[[Release, dict[str, Tensor]], tuple[nn.Module, Card]]  # the model of a release from its tensors


def fetch(release: Release, build: Builder, folder: Path | None = None, source: Path | None = None) -> Path:
    """The converted file of a release; downloaded and converted if it is not in `folder` (default: the cache).

    `source` is a file that was downloaded by hand; it replaces a cached one.
    """
    path = cached_file(release, folder)
    if path.is_file() and source is None:
        return path
    with locked(path):
        if path.is_file() and source is None:  # another process was faster
            return path
        original = source or _download(release)
        try:
            _convert(release, original, path, build)
        except CheckpointError as error:
            raise CheckpointError(f"{release.name}: {error}") from error
        finally:
            if source is None:
                original.unlink(missing_ok=True)
    return path


def _download(release: Release) -> Path:
    if release.by_hand:
        licence = "" if release.licence else " The authors give no licence."
        raise DownloadError(
            f"expected {release.name} in the cache. Download it from {release.url} by hand, then run `saccade pull "
            f"{release.name} --from FILE`.{licence}"
        )
    path = home() / "downloads" / release.url.rpartition("/")[2]
    download(release.url, path, release.name)
    return path


def _convert(release: Release, original: Path, path: Path, build: Builder) -> None:
    if not original.is_file():
        raise CheckpointError(f"expected a downloaded file, got {original}, which does not exist.")
    digest = sha256(original)
    original_weights = read_state_dict(original)
    with torch.device("meta"):  # names and shapes are enough
        model, card = build(release, original_weights)
    converted, report = match_checkpoint(model, original_weights)
    if report.new:
        raise CheckpointError(f"the file has no values for {', '.join(report.new)}. Is it another model's?")
    check_pin(release.name, digest)
    notes = {"source": release.url, "sha256": digest, "licence": release.licence or "none given"}
    notes |= {key: value for key, value in (("accuracy", release.accuracy), ("note", release.note)) if value}
    save_model(model, path, card, converted, **notes)


def build_classifier(release: Release, state_dict: dict[str, Tensor]) -> tuple[nn.Module, Card]:
    """The model of a released classifier or embedding."""
    model: Any = create_model(release.model, **release.options)
    return model, Card(release.model, model.num_classes, release.options, [], preprocess_of(model))
