"""Open a checkpoint of any task: model and card."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from saccade.models.card import Card, Preprocess, open_model, preprocess_of, read_card, weights_file
from saccade.models.checkpoint import CheckpointError, convert_parts, load_checkpoint, read_state_dict
from saccade.models.official import heads
from saccade.models.registry import list_models
from saccade.tasks.detection import create_detector
from saccade.tasks.segmentation import BACKBONE_KWARGS, create_segmenter


def open_task_model(path: str | os.PathLike) -> tuple[nn.Module, Card]:
    """The model of a checkpoint or run folder in evaluation mode, and its card, whose `task` says what it predicts."""
    path = weights_file(path)
    card = read_task_card(path)
    if card.task == "classification":
        return open_model(path)
    if card.task == "detection":
        detector = create_detector(
            card.name, card.head, card.num_classes, backbone_kwargs=card.kwargs, **card.head_kwargs
        )
        load_checkpoint(detector, path)
        return detector.eval(), card
    if card.task != "segmentation":
        raise CheckpointError(
            f"expected a checkpoint for classification, detection or segmentation, got {card.task!r} in {path}. "
            "A newer version of saccade may have written it."
        )
    model = create_segmenter(
        card.name, card.head, card.num_classes, backbone_kwargs=card.kwargs, head_kwargs=card.head_kwargs
    )
    load_checkpoint(model, path)
    if card.preprocess == Preprocess():
        card = card._replace(preprocess=preprocess_of(model.backbone_model))
    return model.eval(), card


def read_task_card(path: str | os.PathLike) -> Card:
    """The card of a checkpoint or run folder; authors' files are identified by their tensors."""
    path = weights_file(path)
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
