"""Augmentation of one image with its mask: both change alike."""

import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from saccade.data.sources.masks import IGNORE
from saccade.data.transforms.mask import BalancedCrop, EvalPair, RandomClassFlip, RandomShorterSide, TrainPair
from tests.data.transforms.pairs import agreement, corner_mask, encoded_pair


@pytest.mark.parametrize("seed", range(4))
def test_train_pair_changes_image_and_mask_alike(seed):
    torch.manual_seed(seed)
    pixels, labels = TrainPair(48, base=60, distort=False)(*encoded_pair())
    assert pixels.shape == (3, 48, 48)
    assert labels.shape == (48, 48)
    assert labels.dtype == pixels.dtype == torch.uint8
    assert set(labels.unique().tolist()) <= {0, 1, 2, 3, IGNORE}
    assert agreement(pixels, labels) > 0.85


def test_train_pair_pads_small_images_at_the_right_and_bottom():
    torch.manual_seed(0)
    mask = torch.full((20, 20), 3, dtype=torch.uint8).numpy()
    transform = TrainPair(40, base=20, scale=(1.0, 1.0), flip=0.0, distort=False, mean=(0, 0, 0))
    pixels, labels = transform(Image.new("RGB", (20, 20), "white"), mask)
    inside = torch.zeros(40, 40, dtype=torch.bool)
    inside[:20, :20] = True
    assert torch.equal(labels == 3, inside)
    assert torch.equal(labels == IGNORE, ~inside)
    assert torch.equal(pixels == 255, inside.expand(3, -1, -1))
    assert pixels[:, ~inside].max() == 0


@pytest.mark.parametrize(("base", "low", "high"), [(30, 15, 60), (None, 30, 120)])
def test_shorter_side_is_a_random_multiple_of_the_base(base, low, high):
    torch.manual_seed(0)
    resize = RandomShorterSide(base, (0.5, 2.0))
    sides = [min(resize(tv_tensors.Image(torch.zeros(3, 60, 80))).shape[-2:]) for _ in range(60)]
    assert low <= min(sides) < low * 1.2
    assert high * 0.85 < max(sides) <= high


def test_balanced_crop_avoids_dominating_classes():
    crop, mask = BalancedCrop(32, max_class_fraction=0.75, attempts=200), torch.from_numpy(corner_mask())
    torch.manual_seed(0)
    fractions = [float((crop(tv_tensors.Mask(mask)) == 1).float().mean()) for _ in range(10)]
    assert all(0.25 <= fraction <= 0.75 for fraction in fractions)


def test_balanced_crop_contains_two_classes_at_any_fraction():
    crop, mask = BalancedCrop(32, max_class_fraction=1.0, attempts=200), torch.from_numpy(corner_mask())
    torch.manual_seed(0)
    assert all(len(crop(tv_tensors.Mask(mask)).unique()) == 2 for _ in range(20))


def test_class_flip_mirrors_and_exchanges_left_and_right_classes():
    mask = torch.tensor([[0, 1, 1], [2, 0, IGNORE]], dtype=torch.uint8)
    flipped = RandomClassFlip(1.0, [0, 2, 1])(tv_tensors.Mask(mask))
    assert flipped.tolist() == [[2, 2, 0], [IGNORE, 0, 1]]
    image = tv_tensors.Image(torch.arange(6, dtype=torch.uint8).view(1, 2, 3))
    assert RandomClassFlip(1.0, [0, 2, 1])(image).tolist() == [[[2, 1, 0], [5, 4, 3]]]
    assert RandomClassFlip(0.0, [0, 2, 1])(tv_tensors.Mask(mask)).tolist() == mask.tolist()


def test_distort_changes_colours_and_not_the_mask():
    torch.manual_seed(0)
    image, mask = encoded_pair(60, 60)
    options = {"base": 60, "scale": (1.0, 1.0), "flip": 0.0}
    pixels, labels = TrainPair(60, distort=True, **options)(image, mask)
    unchanged, same_labels = TrainPair(60, distort=False, **options)(image, mask)
    assert torch.equal(labels, same_labels)
    assert not torch.equal(pixels, unchanged)


def test_eval_pair_returns_the_pair_unchanged():
    image, mask = encoded_pair()
    pixels, labels = EvalPair()(image, mask)
    assert pixels.shape == (3, 60, 80)
    assert agreement(pixels, labels) == 1
    assert labels.tolist() == mask.tolist()
