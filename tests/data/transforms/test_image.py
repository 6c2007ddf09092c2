"""Transforms of single images: sizes, the evaluation protocol and caching."""

import pytest
import torch
from PIL import Image

from saccade.data.loader import seed_all
from saccade.data.transforms.image import MemoryTransform, eval_transform, train_transform


@pytest.mark.parametrize("crop", ["resized", "pad", "none"])
@pytest.mark.parametrize("policy", ["", "trivial", "rand-m9-mstd0.5-inc1", "original"])
def test_train_transform_returns_uint8_of_the_given_size(crop, policy):
    image = Image.effect_noise((50, 40), 60).convert("RGB")
    result = train_transform(32, crop=crop, auto_augment=policy, jitter=0.4)(image)
    assert (result.shape, result.dtype) == ((3, 32, 32), torch.uint8)


def test_padded_crop_shifts_by_at_most_the_padding_and_fills_with_the_mean():
    image = Image.new("RGB", (16, 16), "white")
    transform = train_transform(16, crop="pad", pad=0.125, flip=0.0, mean=(0.4, 0.6, 0.8))
    shifts = set()
    for seed in range(300):
        seed_all(seed)
        result = transform(image)
        filled = result[0] != 255
        assert {tuple(colour) for colour in result[:, filled].T.tolist()} <= {(102, 153, 204)}
        shifts.add((int(filled.all(1).sum()), int(filled.all(0).sum())))
    assert shifts == {(rows, columns) for rows in range(3) for columns in range(3)}


def test_auto_augment_policy_disables_jitter():
    image = Image.new("RGB", (32, 32), (200, 100, 50))
    transform = train_transform(32, crop="none", flip=0.0, jitter=0.9, auto_augment="rand-m0-n0")
    seed_all(0)
    assert torch.equal(transform(image), eval_transform(32)(image))


def test_eval_transform_resizes_the_shorter_side_and_crops_the_centre():
    """A red border of 1/16 is cropped at crop_pct 0.875 and remains at 1.0."""
    image = Image.new("RGB", (64, 64), "red")
    image.paste(Image.new("RGB", (56, 56), "blue"), (4, 4))
    cropped, complete = (eval_transform(56, crop_pct)(image) for crop_pct in (0.875, 1.0))
    assert cropped[0].max() == 0
    assert complete[0, 0].float().mean() > 200
    wide = eval_transform(16)(Image.new("RGB", (64, 32)))
    assert wide.shape == (3, 16, 16)


def test_memory_transform_keeps_images_of_the_right_size():
    image = Image.effect_noise((24, 24), 60).convert("RGB")
    assert torch.equal(MemoryTransform(24)(image), eval_transform(24)(image))
    assert MemoryTransform(16)(Image.new("RGB", (50, 40))).shape == (3, 16, 16)
