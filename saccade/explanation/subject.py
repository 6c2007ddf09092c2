"""The model to explain: from the registry, a checkpoint or a module, with its labels and preprocessing."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import PatchEmbed
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from saccade._errors import UsageError
from saccade.data.decode.inputs import ImageInput, VideoInput
from saccade.data.transforms.batch import normalize
from saccade.explanation.clips import ClipView, load_clip
from saccade.explanation.hooks.record import grouping_modules
from saccade.explanation.images import View, load_crop, load_view
from saccade.models.card import Preprocess
from saccade.models.checkpoint import load_checkpoint
from saccade.models.registry import create_model, list_models
from saccade.tasks.detection import DETECTORS
from saccade.tasks.load import card_of, describe_model, load, read_task_card
from saccade.tasks.segmentation import Segmenter
from saccade.weights.read import weights_file
from saccade.weights.tags import embedded_tag

CHECKPOINTS = (".safetensors", ".pth", ".pt", ".bin")


class Subject(NamedTuple):
    """A model to explain."""

    model: nn.Module
    name: str
    weights: str  # their origin, for the report
    trained: bool
    labels: Sequence[str] | None  # class names
    size: int  # side of the square input it was made for; of detectors, the shorter side
    mean: tuple[float, ...]
    std: tuple[float, ...]
    frames: int = 0  # per clip; 0 for image models
    stride: int = 1  # video frames from one frame of a clip to the next
    detector: nn.Module | None = None  # whose backbone `model` is
    longest: int | None = None  # side of a detector's input; `size` is then its shorter side
    crop_pct: float | None = None  # classifiers: centre crop / shorter side, as `saccade.predict`; None: no crop
    interpolation: str = "bicubic"
    fixed: bool = False  # whether the model accepts squares of `size` only, as timm's ViTs do by default
    multi_label: bool = False  # any number of classes per image

    def label(self, index: int) -> str:
        """Name of a class, "class 3" if unknown."""
        return self.labels[index] if self.labels and index < len(self.labels) else f"class {index}"

    def probabilities(self, logits: Tensor) -> Tensor:
        """Class probabilities (…, K); of a multi-label model every class has its own."""
        return logits.float().sigmoid() if self.multi_label else logits.float().softmax(-1)

    def view(self, source: ImageInput, name: str = "", size: int | None = None, full: bool = False) -> View:
        """Input and canvas of an image: a classifier's centre crop, or with `full` the image in its aspect ratio."""
        self.check_size(size, full)
        if self.crop_pct is None or full:
            return load_view(source, size or self.size, name, self.longest)
        return load_crop(source, size or self.size, self.crop_pct, self.interpolation, name)

    def check_size(self, size: int | None, full: bool = False) -> None:
        """ValueError if the model accepts squares of one size only, and another size or shape is requested."""
        if self.fixed and (full or size not in (None, self.size)):
            wanted = "the full image" if full else f"{size} px"
            raise UsageError(
                f"expected squares of {self.size} px for {self.name}, got {wanted}. Leave the size out, or create the "
                "model for other sizes (ViT: dynamic_img_size=True)."
            )

    def clip(self, source: VideoInput, name: str = "", size: int | None = None, full: bool = False) -> ClipView:
        """Input and frames of a video, cropped as `view` crops images."""
        crop_pct = None if full else self.crop_pct
        return load_clip(source, size or self.size, self.frames, self.stride, name, crop_pct)

    def prepare(self, images: Tensor) -> Tensor:
        """Images or clips in [0, 1], normalised, with the model's device and dtype."""
        return normalize(images, self.mean, self.std).to(next(self.model.parameters()))


def load_subject(
    model: nn.Module | str | os.PathLike,
    labels: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Subject:
    """Load a module, a registered name, or a checkpoint (saccade's or the authors').

    A name gets its pretrained weights if there are any, else random ones from `seed`. `options` are keywords of the
    model, for ablations. Of a detector, the backbone is explained, since it has the tokens.
    """
    options = dict(options or {})
    if isinstance(model, nn.Module):
        module, name, weights, trained = model, describe_model(model).name, "as passed", True
    elif is_checkpoint(Path(model)):
        module = _from_file(Path(model), options)
        name, weights, trained = card_of(module).name, Path(model).name, True
    else:
        name = str(model)
        module, weights, trained = _from_registry(name, seed, options)
    card = card_of(module)
    if device is not None:
        module = module.to(device)
    detector = module if isinstance(module, DETECTORS) else None
    backbone = module if detector is None else detector.backbone_model
    grouping_modules(backbone)  # raises for models without tokens
    preprocess = card.preprocess
    mean, std, channels = preprocess.mean, preprocess.std, getattr(backbone, "in_chans", 3)
    if channels == 1:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    elif channels != 3:
        raise ValueError(f"expected a model with 3 input channels or 1, got {name} with {channels}.")
    is_imagenet = card.task == "classification" and card.num_classes == 1000
    labels = labels or (card.names if card.classes or is_imagenet else None)
    size, longest = preprocess.size, None
    if detector is not None:
        transform: Any = detector.transform  # torchvision infers int for the tuple of sizes
        size, longest = transform.min_size[-1], transform.max_size
    strict = [m for m in backbone.modules() if isinstance(m, PatchEmbed) and m.strict_img_size]
    if strict:
        fixed: Any = strict[0].img_size  # (H, W)
        size = fixed[0]
    clip = preprocess.frames, preprocess.stride
    crop = None if isinstance(module, (*DETECTORS, Segmenter)) else preprocess.crop_pct
    crops = crop, preprocess.interpolation
    subject = Subject(backbone, name, weights, trained, labels, size, mean, std, *clip, detector, longest, *crops)
    return subject._replace(fixed=bool(strict), multi_label=card is not None and card.multi_label)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a file, has a checkpoint's suffix, or is the folder of a training run."""
    if path.is_dir():
        return any((path / name).is_file() for name in ("best.safetensors", "last.safetensors"))
    return path.is_file() or path.suffix in CHECKPOINTS


def _from_file(path: Path, options: dict[str, Any]) -> nn.Module:
    """Model of a checkpoint with its card; `options` override the model's own."""
    if not options:
        return load(path)
    card = read_task_card(path)
    if card.task in ("segmentation", "detection"):
        raise UsageError(f"expected no model options for the {card.task} model {path}, got {', '.join(options)}.")
    keywords: dict[str, Any] = {"num_classes": card.num_classes} | card.kwargs | options
    model = create_model(card.name, **keywords)
    load_checkpoint(model, weights_file(path))
    if card.preprocess == Preprocess():
        card = card._replace(preprocess=describe_model(model).preprocess)
    model.card = card  # type: ignore[assignment] # nn.Module declares tensors and modules only
    return model


def _from_registry(name: str, seed: int, options: dict[str, Any]) -> tuple[nn.Module, str, bool]:
    """Model, origin of its weights, and whether they are pretrained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model(name, **options)
    config = get_pretrained_cfg(name, allow_unregistered=True)
    plain = name.partition(".")[0]
    tag = embedded_tag(plain) if name == plain and plain in list_models() and not options else None
    if tag or (config is not None and config.has_weights):  # embedded weights are not loaded into an ablation
        name = f"{plain}.{tag}" if tag else name
        return create_model(name, pretrained=True, **options), f"pretrained, {name}" if tag else "pretrained", True
    return model, f"random initialisation, seed {seed}", False
