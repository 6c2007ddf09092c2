"""Models of any task with their cards: from run folders, checkpoints, embedded names, model names and the Hub."""

import os
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from saccade import weights
from saccade._errors import UsageError
from saccade.models.card import Card, Preprocess, preprocess_of, read_card, timm_config
from saccade.models.checkpoint import load_checkpoint, match_checkpoint
from saccade.models.official import convert_parts, heads
from saccade.models.registry import create_model, list_models
from saccade.tasks.detection import DETECTORS, create_detector
from saccade.tasks.released import fetch_release
from saccade.tasks.segmentation import BACKBONE_KWARGS, Segmenter, create_segmenter
from saccade.weights.hub import PREFIX, hub_file
from saccade.weights.read import CheckpointError, read_state_dict, weights_file
from saccade.weights.releases import find

CLIP_STRIDE = 4  # frames between two frames of a clip, for video models without a card


class SourceError(CheckpointError, UsageError):
    """What was given to `load` can have no weights, whatever files there are."""


def load(source: str | os.PathLike, *, device: str | torch.device | None = None) -> nn.Module:
    """The model of `source` in evaluation mode; its attribute `card` says what it is.

    Args:
        source: a training run's folder (its best weights), a weights file of saccade or of the authors, the name of
            embedded weights ("svit_nano", "paca_nano+paca") or of released ones ("sparseformer_tiny",
            "paca_small+paca", downloaded on first use), or "hf-hub:owner/name".

    Example:
        >>> saccade.load("svit_nano").card
        Card(svit_nano: classification, 200 classes, 128 px)
    """
    name = str(source)
    if name.endswith((".yaml", ".yml")):
        raise SourceError(f"expected weights or a run folder, got the recipe {name}. Train it: saccade train {name}")
    local = Path(source).exists() or weights.find(name) is not None
    if name.startswith(PREFIX):
        model = _load_file(hub_file(name))
    elif not local and (release := find(name)) is not None:
        model = _load_file(fetch_release(release))
    elif not local and timm.is_model(name.partition(".")[0]):
        model = _load_name(name)
    else:
        model = _load_file(weights_file(source))
    return model.to(device) if device is not None else model


def card_of(model: nn.Module) -> Card:
    """`model.card`, or a card from timm's configuration for models that were not loaded from a file."""
    card: Any = getattr(model, "card", None)
    return card if isinstance(card, Card) else describe_model(model)


def describe_model(model: nn.Module) -> Card:
    """A card from timm's configuration of the model or of the backbone inside it."""
    configured: Any = next((module for module in model.modules() if getattr(module, "pretrained_cfg", None)), model)
    config = getattr(configured, "pretrained_cfg", None) or {}
    name = config.get("architecture") or type(model).__name__
    owner: Any = model
    num_classes = int(getattr(owner, "num_classes", 0) or 0)
    preprocess = preprocess_of(configured)
    if preprocess.frames:
        preprocess = preprocess._replace(stride=CLIP_STRIDE)
    if isinstance(model, DETECTORS):
        return Card(name, num_classes, {}, [], preprocess, "detection")
    if isinstance(model, Segmenter):
        return Card(name, num_classes, {}, [], preprocess, "segmentation")
    return Card(name, num_classes, {}, list(config.get("label_names") or []), preprocess)


def _load_file(path: Path) -> nn.Module:
    card = read_task_card(path)
    state_dict = read_state_dict(path)
    try:
        with torch.device("meta"):  # options in a card cannot allocate more than the tensors of the file
            skeleton = _build(card, path)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AssertionError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"expected a card whose model can be built, got {card} in {path} ({reason}).") from error
    match_checkpoint(skeleton, state_dict)
    model = _build(card, path)
    load_checkpoint(model, state_dict)
    if card.preprocess == Preprocess():
        card = card._replace(preprocess=describe_model(model).preprocess)
    if card.task == "classification":  # for timm.data.resolve_data_config
        config: Any = model.pretrained_cfg
        model.pretrained_cfg = model.default_cfg = config | timm_config(card, video=len(config["input_size"]) == 4)
    model.card = card  # type: ignore[assignment] # nn.Module declares tensors and modules only
    model.weights_file = path  # type: ignore[assignment] # `saccade.evaluate` reads the recipe next to it
    return model.eval()


def _build(card: Card, path: Path) -> nn.Module:
    """A model with the classes and options of a card, randomly initialised."""
    if card.task == "classification":
        return create_model(card.name, num_classes=card.num_classes, **card.kwargs)
    if card.task == "detection":
        options: dict[str, Any] = {"backbone_kwargs": card.kwargs} | card.head_kwargs
        return create_detector(card.name, card.head, card.num_classes, **options)
    if card.task == "segmentation":
        options = {"backbone_kwargs": card.kwargs, "head_kwargs": card.head_kwargs}
        return create_segmenter(card.name, card.head, card.num_classes, **options)
    raise CheckpointError(
        f"expected a checkpoint for classification, detection or segmentation, got {card.task!r} in {path}. "
        "A newer version of saccade may have written it."
    )


def _load_name(name: str) -> nn.Module:
    """A registered model with the weights that timm's configuration names."""
    config = get_pretrained_cfg(name, allow_unregistered=True)
    if config is None or not config.has_weights:
        raise SourceError(
            f"no weights are known for {name}. Pass a weights file or a run's folder, one of "
            f"{', '.join(weights.embedded())}, or build it with saccade.create_model."
        )
    model = create_model(name, pretrained=True)
    model.card = describe_model(model)._replace(name=name)  # type: ignore[assignment] # as above
    return model.eval()


def check_format(path: Path) -> None:
    """Raise for a file that is neither safetensors nor what torch.save writes: a zip archive or a pickle."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt"):
                return
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or incomplete ({error}). Download or copy it again.") from error
    with path.open("rb") as file:
        start = file.read(2)
    if start and start != b"PK" and start[:1] != b"\x80":
        raise CheckpointError(f"{path} is no checkpoint: expected a .safetensors file, or a .pth file of torch.save.")


def read_task_card(path: str | os.PathLike) -> Card:
    """The card of a checkpoint or run folder; authors' files are identified by their tensors."""
    path = weights_file(path)
    check_format(path)
    if not str(path).endswith(".safetensors"):
        state_dict = read_state_dict(path)
        if heads.matches(state_dict):
            return identify_segmenter(state_dict)
    return read_card(path)


def identify_segmenter(state_dict: dict[str, Tensor]) -> Card:
    """Identify backbone and head of an authors' file by the names and shapes of its tensors."""
    kind = heads.matches(state_dict)
    if kind is None:
        raise CheckpointError("expected a segmentation head under mmsegmentation's names (decode_head.*), got none.")
    classes = state_dict["decode_head.conv_seg.weight"].shape[0]
    for name in list_models():
        if name.startswith("video_"):  # no feature maps to segment
            continue
        for kwargs in _backbone_options(name):
            with torch.device("meta"):
                model = create_segmenter(name, kind, classes, backbone_kwargs=kwargs)
            try:
                ours = convert_parts(state_dict, model)[0]
            except CheckpointError:
                continue
            if {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in model.state_dict().items()}:
                return Card(name, classes, kwargs, [], Preprocess(), "segmentation", kind)
    raise CheckpointError("no registered backbone has the tensors of this segmentation checkpoint.")


def _backbone_options(name: str) -> list[dict[str, Any]]:
    """Backbone options to try: PaCa has 200 clusters in the paper's segmenters, 100 in a released file."""
    if name not in BACKBONE_KWARGS:
        return [{}]
    return [{}, {"clusters": tuple(count // 2 for count in BACKBONE_KWARGS[name]["clusters"])}]
