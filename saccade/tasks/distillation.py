"""A teacher's logits as a second target (VT-56): loss = w * distillation + (1 - w) * cross-entropy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.models.card import Preprocess, open_model, preprocess_of
from saccade.tasks.video import average_views


class Teacher(nn.Module):
    """Any model that answers pictures with logits; frozen, in evaluation mode, fed in its own colours.

    It looks at the student's pictures, brought to `size` where one is given or where it takes no other.
    """

    def __init__(self, model: nn.Module, num_classes: int, seen: Preprocess, size: int | None = None):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        about = preprocess_of(model)
        wanted = size or (about.size if _is_fixed(model) else seen.size)
        self.size = wanted if wanted != seen.size else None
        # x normalised for the student -> normalised for the teacher: x * gain + offset
        mean, std = torch.tensor(seen.mean), torch.tensor(seen.std)
        own_mean, own_std = torch.tensor(about.mean), torch.tensor(about.std)
        self.register_buffer("gain", (std / own_std)[:, None, None])
        self.register_buffer("offset", ((mean - own_mean) / own_std)[:, None, None])
        classes = getattr(model, "num_classes", num_classes)
        if classes != num_classes:
            raise ValueError(f"the teacher tells {classes} classes apart, the data has {num_classes}: choose another.")

    def train(self, mode: bool = True) -> "Teacher":
        return self  # a teacher is never trained

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Pictures normalised for the student (B, 3, H, W) -> logits (B, K)."""
        images = images * self.gain + self.offset
        if self.size is not None:
            images = F.interpolate(images, (self.size, self.size), mode="bicubic", antialias=True)
        return self.model(images)


class Teachers(nn.Module):
    """Several that agree on one answer: the mean of their probabilities, as logits."""

    def __init__(self, teachers: Sequence[Teacher]):
        super().__init__()
        self.teachers = nn.ModuleList(teachers)

    def train(self, mode: bool = True) -> "Teachers":
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Pictures normalised for the student (B, 3, H, W) -> logits (B, K)."""
        return average_views(torch.stack([teacher(images) for teacher in self.teachers], 1))


def load_teacher(
    source: str, classes: int, seen: Preprocess, size: int | None = None, **kwargs: Any
) -> Teacher | Teachers:
    """A saccade checkpoint by path, or a timm model by name with its pretrained weights, for `classes` classes.

    Several are separated by commas. `size` is what they look at: None the student's, 0 each its own.
    """
    names = [source] if Path(source).exists() else [name.strip() for name in source.split(",")]
    teachers = [_load_one(name, classes, seen, size, kwargs) for name in names]
    return teachers[0] if len(teachers) == 1 else Teachers(teachers)


def _load_one(source: str, classes: int, seen: Preprocess, size: int | None, kwargs: dict[str, Any]) -> Teacher:
    if Path(source).exists():
        model, card = open_model(source)
        size = card.preprocess.size if size == 0 else size
    elif timm.is_model(source.partition(".")[0]):
        model = timm.create_model(source, **({"pretrained": True} | kwargs))
    else:
        raise ValueError(f"no teacher {source!r}: expected a saccade checkpoint or the name of a timm model.")
    return Teacher(model, classes, seen, preprocess_of(model).size if size == 0 else size)


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, kind: str = "soft") -> Tensor:
    """Kullback-Leibler divergence of softened logits (B, K), or cross-entropy with the teacher's first choice."""
    if kind == "hard":
        return F.cross_entropy(student.float(), teacher.argmax(1))
    log_student = F.log_softmax(student.float() / temperature, dim=1)
    log_teacher = F.log_softmax(teacher.float() / temperature, dim=1)
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2


def _is_fixed(model: nn.Module) -> bool:
    about: Any = getattr(model, "pretrained_cfg", {})
    return bool(about.get("fixed_input_size"))
