"""Knowledge distillation (VT Sec. 5.2): loss = w * distillation + (1 - w) * cross-entropy.

`Teacher.features` and `alignment_loss` are those of SparseFormer v2, whose final token is aligned with that of its
source ViT.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.models.card import Preprocess, preprocess_of
from saccade.tasks.load import card_of, load
from saccade.tasks.video import average_views


class Teacher(nn.Module):
    """A frozen model in evaluation mode that reads the student's images, converted to its own normalisation.

    `num_classes` is checked unless it is None. Images are resized to `size` if given, or to the teacher's size if it
    accepts no other.
    """

    gain: Tensor
    offset: Tensor

    def __init__(self, model: nn.Module, num_classes: int | None, student: Preprocess, size: int | None = None):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        own = card_of(model).preprocess
        teacher_size = size or (own.size if _has_fixed_size(model) else student.size)
        self.size = teacher_size if teacher_size != student.size else None
        # Normalised for the student -> normalised for the teacher: x * gain + offset
        mean, std = torch.tensor(student.mean), torch.tensor(student.std)
        own_mean, own_std = torch.tensor(own.mean), torch.tensor(own.std)
        self.register_buffer("gain", (std / own_std)[:, None, None])
        self.register_buffer("offset", ((mean - own_mean) / own_std)[:, None, None])
        classes = getattr(model, "num_classes", num_classes)
        if num_classes is not None and classes != num_classes:
            raise ValueError(f"the teacher has {classes} classes, the data has {num_classes}. Choose another teacher.")

    def train(self, mode: bool = True) -> "Teacher":
        return self  # stays in evaluation mode inside a training module

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) normalised for the student -> logits (B, K)."""
        return self.model(self._convert(images))

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) normalised for the student -> `final_features` (B, D)."""
        return final_features(self.model, self._convert(images))

    def _convert(self, images: Tensor) -> Tensor:
        images = images * self.gain + self.offset
        if self.size is None:
            return images
        return F.interpolate(images, (self.size, self.size), mode="bicubic", antialias=True)


class TeacherEnsemble(nn.Module):
    """Several teachers: the log of their mean probability."""

    def __init__(self, teachers: Sequence[Teacher]):
        super().__init__()
        self.teachers = nn.ModuleList(teachers)

    def train(self, mode: bool = True) -> "TeacherEnsemble":
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) normalised for the student -> logits (B, K)."""
        return average_views(torch.stack([teacher(images) for teacher in self.teachers], 1))


def load_teacher(
    source: str | nn.Module, num_classes: int | None, student: Preprocess, /, size: int | None = None, **kwargs: Any
) -> Teacher | TeacherEnsemble:
    """A module, a saccade checkpoint by path, a pretrained timm model by name, or any module by the function that
    returns it, "package.module:function"; an ensemble if separated by commas.

    `size` is the teachers' image size: None for the student's, 0 for each teacher's own. `kwargs` are those of timm's
    models and of functions.
    """
    if isinstance(source, nn.Module):
        return Teacher(source, num_classes, student, preprocess_of(source).size if size == 0 else size)
    names = [source] if Path(source).exists() else [name.strip() for name in source.split(",")]
    teachers = [_load_one_teacher(name, num_classes, student, size, kwargs) for name in names]
    return teachers[0] if len(teachers) == 1 else TeacherEnsemble(teachers)


def _load_one_teacher(
    source: str, num_classes: int | None, student: Preprocess, size: int | None, kwargs: dict[str, Any]
) -> Teacher:
    model = load_teacher_model(source, **kwargs)
    return Teacher(model, num_classes, student, card_of(model).preprocess.size if size == 0 else size)


def load_teacher_model(source: str, /, **kwargs: Any) -> nn.Module:
    """The model of one teacher; see `load_teacher`."""
    if Path(source).exists():
        model = load(source)
        if card_of(model).task != "classification":
            raise ValueError(f"expected a classifier as teacher, got {card_of(model)} in {source}.")
        return model
    if ":" in source and not source.startswith("hf-hub:"):
        return _call(source, kwargs)
    if timm.is_model(source.partition(".")[0]):
        options: dict[str, Any] = {"pretrained": True} | kwargs
        return timm.create_model(source, **options)
    raise ValueError(
        "expected a saccade checkpoint, the name of a timm model or package.module:function as teacher, "
        f"got {source!r}."
    )


def _call(source: str, kwargs: dict[str, Any]) -> nn.Module:
    """The module that "package.module:function" returns when called with `kwargs`."""
    module, _, function = source.partition(":")
    try:
        model = getattr(import_module(module), function)(**kwargs)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"expected package.module:function as teacher, got {source!r} ({error}).") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch module from {source}, got {type(model).__name__}.")
    return model


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, kind: str = "soft") -> Tensor:
    """KL divergence of logits (B, K) at a temperature, or with kind="hard" cross-entropy with the teacher's top-1."""
    if kind == "hard":
        return F.cross_entropy(student.float(), teacher.argmax(1))
    log_student = F.log_softmax(student.float() / temperature, dim=1)
    log_teacher = F.log_softmax(teacher.float() / temperature, dim=1)
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2


def final_features(model: Any, images: Tensor) -> Tensor:
    """images (B, 3, H, W) -> input (B, D) of a timm model's last linear layer: of a ViT, its normalised final token."""
    return model.forward_head(model.forward_features(images), pre_logits=True)


def alignment_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine similarity of final features (B, D), averaged. Our choice: arXiv 2312.01987 is not explicit."""
    return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=1).mean()


def _has_fixed_size(model: nn.Module) -> bool:
    config: Any = getattr(model, "pretrained_cfg", {})  # timm's, absent from plain modules
    return bool(config.get("fixed_input_size"))
