"""The authors' released segmenters and detectors, and weights of a task by tag."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from saccade import weights
from saccade._errors import UsageError
from saccade.data.sources.class_names import COCO_THINGS
from saccade.models.card import Card, preprocess_of, read_card
from saccade.models.official import BACKBONE, heads, mask_rcnn, paca
from saccade.tasks.detection import create_detector
from saccade.tasks.segmentation import create_segmenter
from saccade.weights.fetch import build_classifier, fetch
from saccade.weights.read import CheckpointError
from saccade.weights.releases import RELEASES, Release, find

SEGMENTATION_SIDE = 512  # shorter side of images in the papers' ADE20K evaluation
MMDETECTION: dict[str, Any] = {"exact_anchors": True, "half_pixel": True}


def pretrained_model(backbone: str, head: str, tag: str) -> tuple[Path, Card]:
    """File and card of "BACKBONE+HEAD.TAG": embedded, or released and downloaded on first use."""
    name = f"{backbone}+{head}.{tag}"
    if (path := weights.embedded().get(name)) is None:
        release = find(name)
        if release is None:
            names = [*weights.embedded(), *(release.name for release in RELEASES)]
            choices = ", ".join(choice for choice in names if choice.startswith(f"{backbone}+")) or "none"
            raise UsageError(f"no weights {name} exist; of {backbone}: {choices}. Train it, or pass checkpoint=.")
        path = fetch_release(release)
    card = read_card(path)
    if card.head != head:
        raise CheckpointError(f"expected {name} with the head {head}, got {card.head} in {path}. Use that head.")
    return path, card


def fetch_release(release: Release, folder: Path | None = None, source: Path | None = None) -> Path:
    """The converted file of a release of any task; see `saccade.weights.fetch.fetch`."""
    return fetch(release, build_task_model if release.head else build_classifier, folder, source)


def build_task_model(release: Release, state_dict: dict[str, Tensor]) -> tuple[nn.Module, Card]:
    """A backbone with its head, whose kind and numbers of classes and clusters are read from the file."""
    backbone = {k.removeprefix(BACKBONE): v for k, v in state_dict.items() if k.startswith(BACKBONE)}
    kwargs = release.options | {"clusters": paca.clusters(paca.convert(backbone, nn.Identity()))}
    if mask_rcnn.matches(state_dict):
        classes = len(state_dict["roi_head.bbox_head.fc_cls.weight"]) - 1
        model: Any = create_detector(release.backbone, "mask_rcnn", classes, backbone_kwargs=kwargs, **MMDETECTION)
        names = COCO_THINGS if classes == 80 else []  # in mmdetection's order
        card = Card(release.backbone, classes, kwargs, names, preprocess_of(model.backbone_model), "detection")
        card = card._replace(head="mask_rcnn", head_kwargs=MMDETECTION)
    elif (head := heads.matches(state_dict)) is not None:
        classes = len(state_dict["decode_head.conv_seg.weight"])
        model = create_segmenter(release.backbone, head, classes, backbone_kwargs=kwargs)
        card = Card(release.backbone, classes, kwargs, [], preprocess_of(model.backbone_model), "segmentation", head)
        card = card._replace(shorter=SEGMENTATION_SIDE)
    else:
        raise CheckpointError("expected mmdetection's roi_head.* or mmsegmentation's decode_head.*, got neither.")
    return model, card
