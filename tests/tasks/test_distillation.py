"""Teachers and the distillation loss."""

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from saccade.engine.recipe import load_recipe
from saccade.models.card import Card, Preprocess, preprocess_of, save_model
from saccade.tasks.classification import build_classifier
from saccade.tasks.distillation import Teacher, alignment_loss, distillation_loss, load_teacher
from tests.tasks.test_classification import SMALL


@pytest.mark.shows("VT-56", "VT-57")
def test_distillation_loss_is_the_kl_divergence_from_the_teacher():
    student, teacher = torch.randn(6, 5), torch.randn(6, 5)
    soft = (teacher / 3).softmax(1)
    by_hand = (soft * (soft.log() - (student / 3).log_softmax(1))).sum(1).mean() * 9
    torch.testing.assert_close(distillation_loss(student, teacher, temperature=3.0), by_hand)
    assert float(distillation_loss(teacher, teacher)) == pytest.approx(0, abs=1e-6)
    hard = F.cross_entropy(student, teacher.argmax(1))
    torch.testing.assert_close(distillation_loss(student, teacher, kind="hard"), hard)


class SpyModel(nn.Module):
    """Stores its inputs; normalisation mean 0.5, std 0.5."""

    num_classes = 3

    def __init__(self, **config):
        super().__init__()
        self.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": (3, 32, 32)} | config
        self.weight = nn.Parameter(torch.ones(()))
        self.inputs: list[torch.Tensor] = []

    def forward(self, images):
        self.inputs.append(images)
        return self.weight * images.mean((2, 3))


STUDENT = Preprocess(32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_teacher_gets_images_in_its_own_normalisation():
    pixels = torch.rand(2, 3, 32, 32)
    mean, std = torch.tensor(STUDENT.mean)[:, None, None], torch.tensor(STUDENT.std)[:, None, None]
    model = SpyModel()
    Teacher(model, 3, STUDENT)((pixels - mean) / std)
    torch.testing.assert_close(model.inputs[0], (pixels - 0.5) / 0.5)


@pytest.mark.shows("VT-57")
def test_teacher_is_frozen_and_stays_in_evaluation_mode():
    teacher = Teacher(SpyModel(), 3, STUDENT).train()
    assert not teacher.model.training
    assert not teacher.model.weight.requires_grad
    assert not teacher(torch.rand(2, 3, 32, 32)).requires_grad


@pytest.mark.parametrize(
    ("size", "fixed", "side"), [(None, False, 32), (48, False, 48), (None, True, 40), (48, True, 48)]
)
def test_teacher_resizes_to_the_given_or_its_fixed_size(size, fixed, side):
    model = SpyModel(input_size=(3, 40, 40), fixed_input_size=fixed)
    Teacher(model, 3, STUDENT, size=size)(torch.rand(2, 3, 32, 32))
    assert model.inputs[0].shape == (2, 3, side, side)


def test_teacher_for_other_classes_is_refused():
    with pytest.raises(ValueError, match=r"the teacher has 7 classes, the data has 10\. Choose another teacher"):
        load_teacher("resnet10t", 10, Preprocess(), pretrained=False, num_classes=7)
    with pytest.raises(ValueError, match=r"expected a saccade checkpoint, .* as teacher, got 'x'"):
        load_teacher("x", 10, Preprocess())


@pytest.mark.shows("VT-57")
def test_saccade_checkpoint_is_a_teacher(tmp_path):
    model = build_classifier("svit_nano", 3, **SMALL).eval()
    card = Card("svit_nano", 3, SMALL, ["a", "b", "c"], Preprocess(32))
    save_model(model, tmp_path / "t.safetensors", card)
    teacher = load_teacher(str(tmp_path / "t.safetensors"), 3, preprocess_of(model))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(teacher(images), model(images), atol=1e-5, rtol=1e-5)


class MeanColour(nn.Module):
    """A module of no registry: the mean colour of an image, times a gain."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.gain = gain

    def forward(self, images):
        return self.gain * images.mean((2, 3))


@pytest.mark.shows("VT-57")
def test_any_module_is_a_teacher():
    """As a module from Python, and by the function that makes it from a recipe; it gets normalised images."""
    student, images = Preprocess(32), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(load_teacher(MeanColour(), 3, student)(images), images.mean((2, 3)))
    changes = [f"distill.teacher={__name__}:MeanColour", "distill.kwargs.gain=2.0"]
    distill = load_recipe(None, changes).distill
    teacher = load_teacher(distill.teacher, 3, student, distill.image_size, **distill.kwargs)
    torch.testing.assert_close(teacher(images), 2 * images.mean((2, 3)))
    with pytest.raises(ValueError, match=r"expected package\.module:function as teacher, got 'nowhere:f'"):
        load_teacher("nowhere:f", 3, student)
    with pytest.raises(ValueError, match="expected a torch module from builtins:dict, got dict"):
        load_teacher("builtins:dict", 3, student)


def test_ensemble_averages_probabilities(tmp_path):
    files, models = [], []
    for seed, size in ((0, 32), (1, 48)):
        torch.manual_seed(seed)
        models.append(build_classifier("svit_nano", 3, **SMALL).eval())
        files.append(str(tmp_path / f"{seed},{size}.safetensors"))  # a comma in the name of an existing file
        save_model(models[-1], files[-1], Card("svit_nano", 3, SMALL, ["a", "b", "c"], Preprocess(size)))
    student, images = preprocess_of(models[0])._replace(size=32), torch.randn(2, 3, 32, 32)
    assert isinstance(load_teacher(files[0], 3, student), Teacher)
    plain = [str(tmp_path / "first.safetensors"), str(tmp_path / "second.safetensors")]
    for file, name in zip(files, plain, strict=True):
        Path(file).rename(name)
    for size, second in ((None, images), (0, F.interpolate(images, (48, 48), mode="bicubic", antialias=True))):
        ensemble = load_teacher(", ".join(plain), 3, student, size).train()
        expected = (models[0](images).softmax(1) + models[1](second).softmax(1)) / 2
        torch.testing.assert_close(ensemble(images).exp(), expected, atol=1e-5, rtol=1e-5)
        assert not any(module.training for module in ensemble.teachers[0].model.modules())
    with pytest.raises(ValueError, match="as teacher, got 'x'"):
        load_teacher(f"{plain[0]},x", 3, student)


def test_alignment_loss_is_the_cosine_distance():
    student, teacher = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 2.0], [6.0, 8.0]])
    assert float(alignment_loss(student, teacher)) == pytest.approx(0.5)


def test_features_of_a_teacher_are_the_inputs_of_its_classifier():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=2, num_classes=5)
    model.card = Card("vit_tiny_patch16_224", 5, {}, [], Preprocess(32, STUDENT.mean, STUDENT.std))
    teacher, images = Teacher(model, None, STUDENT), torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model.head(teacher.features(images)), teacher(images))
    assert not teacher.features(images).requires_grad
