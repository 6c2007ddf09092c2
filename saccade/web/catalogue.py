"""The models a page offers: embedded weights, the user's checkpoints, and fresh ones where a family has neither."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import torch
from torch import nn

from saccade import weights
from saccade.explain.subject import Subject, load_subject
from saccade.models.card import Card, weights_file
from saccade.models.checkpoint import CheckpointError
from saccade.models.registry import list_models
from saccade.tasks.open import open_task_model, read_task_card

FAMILIES = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")
KEPT = 4  # models in memory at once


class Offer(NamedTuple):
    """One model of the list."""

    name: str
    source: str  # what to load: a file, an embedded name, or a name of the registry
    task: str
    trained: bool


class Catalogue:
    """Names to models, loaded when they are first asked for, and the least used forgotten."""

    def __init__(self, checkpoints: Sequence[str] = (), models: Sequence[str] = (), device: str = "cpu", seed: int = 0):
        self.device, self.seed, self.lock = device, seed, RLock()
        self.offers = {offer.name: offer for offer in find_offers(checkpoints, models)}
        self.kept: OrderedDict[str, Subject | tuple[nn.Module, Card]] = OrderedDict()

    def names(self, task: str = "classification") -> list[str]:
        return [offer.name for offer in self.offers.values() if offer.task == task]

    def classifier(self, name: str) -> Subject:
        offer = self._offer(name, "classification")
        return self._keep(offer.name, lambda: load_subject(offer.source, device=self.device, seed=self.seed))  # type: ignore

    def segmenter(self, name: str) -> tuple[nn.Module, Card]:
        offer = self._offer(name, "segmentation")

        def load() -> tuple[nn.Module, Card]:
            model, card = open_task_model(offer.source)
            return model.to(torch.device(self.device)), card

        return self._keep(offer.name, load)  # type: ignore

    def _offer(self, name: str, task: str) -> Offer:
        """By its full name, or without the tag."""
        found = next((full for full in self.names(task) if name in (full, full.rpartition(".")[0])), None)
        if found is None:
            raise ValueError(f"there is no model {name!r} here. There are: {', '.join(self.names(task)) or 'none'}.")
        return self.offers[found]

    def _keep(self, name: str, load):
        with self.lock:
            if name not in self.kept:
                self.kept[name] = load()
            self.kept.move_to_end(name)
            while len(self.kept) > KEPT:
                self.kept.popitem(last=False)
            return self.kept[name]


def find_offers(checkpoints: Sequence[str] = (), models: Sequence[str] = ()) -> list[Offer]:
    """Own checkpoints first, then embedded weights, then what is named in `models` or still lacks weights."""
    found: dict[str, Offer] = {}
    for place in checkpoints:
        offer = _own(place, found)
        found[offer.name] = offer
    for name in models:
        if name.partition(".")[0] not in list_models():
            raise ValueError(f"unknown model {name!r}: saccade models lists them all.")
        found[name] = Offer(name, name, "classification", weights.find(name) is not None)
    embedded = {name: path for name, path in weights.embedded().items() if not models or "+" in name}
    for name, path in sorted(embedded.items(), key=lambda item: _place(item[0])):
        task = "segmentation" if "+" in name else "classification"
        found.setdefault(name, Offer(name, str(path), task, True))
    if not models:
        known = {name.rpartition(".")[0] for name in embedded}
        for name in (name for name in FAMILIES if name not in known):
            found.setdefault(name, Offer(name, name, "classification", False))
    return list(found.values())


def _place(name: str) -> int:
    """In the families' order, the rest behind."""
    plain = name.rpartition(".")[0]
    return FAMILIES.index(plain) if plain in FAMILIES else len(FAMILIES)


def _own(place: str, taken: dict[str, Offer]) -> Offer:
    path = weights_file(place)
    card = read_task_card(path)
    if card.preprocess.frames or card.task not in ("classification", "segmentation"):
        kind = "videos" if card.preprocess.frames else card.task
        raise CheckpointError(f"{place} holds a model of {kind}: the page has classifiers and segmenters of pictures.")
    name = Path(place).resolve().name.removesuffix(path.suffix) if Path(place).is_file() else Path(place).resolve().name
    while name in taken:
        name += "'"
    return Offer(name, str(path), card.task, True)
