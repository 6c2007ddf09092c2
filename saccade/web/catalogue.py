"""Models of the page: user checkpoints, embedded weights, and untrained models for families without weights."""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import nn

import saccade
from saccade import weights
from saccade._errors import UsageError
from saccade.explanation import Subject, load_subject
from saccade.tasks.load import read_task_card
from saccade.weights.read import read_metadata, weights_file

FAMILIES = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")
TASKS = ("classification", "segmentation", "detection", "video")
METRICS = {"top1": "top-1", "map": "mAP", "miou": "mIoU", "mask_ap": "mask AP", "box_ap": "box AP"}
MAX_LOADED = 4  # models in memory


class ModelEntry(NamedTuple):
    """One model of the catalogue."""

    name: str
    source: str  # a file, the name of embedded weights, or a registered model name
    task: str  # one of TASKS
    trained: bool
    knows: str = ""  # "200 classes of Tiny-ImageNet-200, 47 % top-1"


class Catalogue:
    """Models by name, loaded on first use; the least recently used is unloaded first."""

    def __init__(self, checkpoints: Sequence[str] = (), models: Sequence[str] = (), device: str = "cpu", seed: int = 0):
        self.device, self.seed, self.lock = device, seed, RLock()
        self.entries = {entry.name: entry for entry in list_entries(checkpoints, models)}
        self.loaded: OrderedDict[str, Any] = OrderedDict()  # name -> Subject or model

    def names(self, task: str = "classification") -> list[str]:
        return [entry.name for entry in self.entries.values() if entry.task == task]

    def entry(self, name: str, tasks: Sequence[str] = TASKS) -> ModelEntry:
        """Find an entry by its name, with or without the tag."""
        entries = [entry for entry in self.entries.values() if entry.task in tasks]
        match = next((entry for entry in entries if name in (entry.name, entry.name.rpartition(".")[0])), None)
        if match is None:
            names = ", ".join(entry.name for entry in entries) or "none"
            raise ValueError(f"unknown model {name!r}. Available: {names}.")
        return match

    def subject(self, name: str) -> Subject:
        """Return an image classifier with its labels and preprocessing, to explain."""
        entry = self.entry(name, ("classification",))
        return self._load(entry.name, lambda: load_subject(entry.source, device=self.device, seed=self.seed))

    def model(self, name: str) -> nn.Module:
        """Return a model of any task, to predict with."""
        entry = self.entry(name)
        return self._load(f"{entry.name}, predictor", lambda: self._open(entry))

    def _open(self, entry: ModelEntry) -> nn.Module:
        if entry.trained:
            return saccade.load(entry.source, device=self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return saccade.create_model(entry.source).eval().to(self.device)

    def _load(self, name: str, load: Callable[[], Any]) -> Any:
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
        entry = _file_entry(path, Path(path).resolve().name)
        while entry.name in entries:
            entry = entry._replace(name=entry.name + "'")
        entries[entry.name] = entry
    for name in models:
        if name.partition(".")[0] not in saccade.list_models():
            raise UsageError(f"unknown model {name!r}. `saccade models` lists all models.")
        entries[name] = _file_entry(name, name) if weights.find(name) else _untrained_entry(name)
    embedded = [name for name in weights.embedded() if not models or "+" in name]
    for name in sorted(embedded, key=_family_order):
        entries.setdefault(name, _file_entry(name, name))
    if not models:
        with_weights = {name.rpartition(".")[0] for name in embedded}
        for name in (name for name in FAMILIES if name not in with_weights):
            entries.setdefault(name, _untrained_entry(name))
    return list(entries.values())


def _family_order(name: str) -> int:
    """Sort key: the order of `FAMILIES`, other models last."""
    model = name.rpartition(".")[0]
    return FAMILIES.index(model) if model in FAMILIES else len(FAMILIES)


def _untrained_entry(name: str) -> ModelEntry:
    return ModelEntry(name, name, "video" if name.startswith("video_") else "classification", False)


def _file_entry(source: str, name: str) -> ModelEntry:
    """Return the entry of a weights file, a run folder, or embedded weights."""
    path = weights_file(source)
    card = read_task_card(path)
    task = "video" if card.preprocess.frames else card.task
    if Path(source).is_file():
        name = name.removesuffix(path.suffix)
    return ModelEntry(name, str(path), task, True, describe_training(path, card.num_classes))


def describe_training(path: Path, num_classes: int) -> str:
    """Return what a model knows, from its card or its run's result.json: "200 classes of CIFAR-100, 47 % top-1"."""
    metadata = read_metadata(path) if path.suffix == ".safetensors" else {}
    card = json.loads(metadata.get("saccade.about", "{}"))
    data, scores = card.get("data", ""), card.get("accuracy", {})
    result = path.with_name("result.json")
    if not card and result.is_file():
        run = json.loads(result.read_text())
        data, scores = run.get("data", ""), run.get("best") or run.get("final", {})
    text = f"{num_classes} classes" + (f" of {data.partition(' (')[0].partition(',')[0]}" if data else "")
    score = next((f", {scores[key]:.0f} % {name}" for key, name in METRICS.items() if key in scores), "")
    return text + score
