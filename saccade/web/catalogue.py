"""Models of the page: user checkpoints, embedded weights, and untrained models for families without weights."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from saccade import weights
from saccade.explain.subject import Subject, load_subject
from saccade.models.card import Card, weights_file
from saccade.models.checkpoint import CheckpointError
from saccade.models.registry import list_models
from saccade.tasks.open import open_task_model, read_task_card

Loaded = TypeVar("Loaded")
FAMILIES = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")
MAX_LOADED = 4  # models in memory


class ModelEntry(NamedTuple):
    """One model of the catalogue."""

    name: str
    source: str  # a file, the name of embedded weights, or a registered model name
    task: str
    trained: bool


class Catalogue:
    """Models by name, loaded on first use; the least recently used is unloaded first."""

    def __init__(self, checkpoints: Sequence[str] = (), models: Sequence[str] = (), device: str = "cpu", seed: int = 0):
        self.device, self.seed, self.lock = device, seed, RLock()
        self.entries = {entry.name: entry for entry in list_entries(checkpoints, models)}
        self.loaded: OrderedDict[str, Any] = OrderedDict()  # name -> Subject or (segmenter, Card)

    def names(self, task: str = "classification") -> list[str]:
        return [entry.name for entry in self.entries.values() if entry.task == task]

    def classifier(self, name: str) -> Subject:
        entry = self._entry(name, "classification")
        return self._load(entry.name, lambda: load_subject(entry.source, device=self.device, seed=self.seed))

    def segmenter(self, name: str) -> tuple[nn.Module, Card]:
        entry = self._entry(name, "segmentation")

        def load() -> tuple[nn.Module, Card]:
            model, card = open_task_model(entry.source)
            return model.to(torch.device(self.device)), card

        return self._load(entry.name, load)

    def _entry(self, name: str, task: str) -> ModelEntry:
        """Find an entry by its name, with or without the tag."""
        match = next((full for full in self.names(task) if name in (full, full.rpartition(".")[0])), None)
        if match is None:
            raise ValueError(f"unknown model {name!r}. Available: {', '.join(self.names(task)) or 'none'}.")
        return self.entries[match]

    def _load(self, name: str, load: Callable[[], Loaded]) -> Loaded:
        with self.lock:
            if name not in self.loaded:
                self.loaded[name] = load()
            self.loaded.move_to_end(name)
            while len(self.loaded) > MAX_LOADED:
                self.loaded.popitem(last=False)
            return self.loaded[name]


def list_entries(checkpoints: Sequence[str] = (), models: Sequence[str] = ()) -> list[ModelEntry]:
    """Return the checkpoints, then `models`, then embedded weights, then families that have no weights."""
    entries: dict[str, ModelEntry] = {}
    for path in checkpoints:
        entry = _checkpoint_entry(path, entries)
        entries[entry.name] = entry
    for name in models:
        if name.partition(".")[0] not in list_models():
            raise ValueError(f"unknown model {name!r}. `saccade models` lists all models.")
        entries[name] = ModelEntry(name, name, "classification", weights.find(name) is not None)
    embedded = {name: path for name, path in weights.embedded().items() if not models or "+" in name}
    for name, path in sorted(embedded.items(), key=lambda item: _family_order(item[0])):
        task = "segmentation" if "+" in name else "classification"
        entries.setdefault(name, ModelEntry(name, str(path), task, True))
    if not models:
        with_weights = {name.rpartition(".")[0] for name in embedded}
        for name in (name for name in FAMILIES if name not in with_weights):
            entries.setdefault(name, ModelEntry(name, name, "classification", False))
    return list(entries.values())


def _family_order(name: str) -> int:
    """Sort key: the order of `FAMILIES`, other models last."""
    model = name.rpartition(".")[0]
    return FAMILIES.index(model) if model in FAMILIES else len(FAMILIES)


def _checkpoint_entry(source: str, entries: dict[str, ModelEntry]) -> ModelEntry:
    path = weights_file(source)
    card = read_task_card(path)
    if card.preprocess.frames or card.task not in ("classification", "segmentation"):
        task = "video classification" if card.preprocess.frames else card.task
        raise CheckpointError(f"expected an image classifier or segmenter, got a {task} model: {source}.")
    name = Path(source).resolve().name
    if Path(source).is_file():
        name = name.removesuffix(path.suffix)
    while name in entries:
        name += "'"
    return ModelEntry(name, str(path), card.task, True)
