"""Augmentation of batches of images and masks: both change alike, and as one by one."""

import torch

from saccade.data.sources.masks import IGNORE
from saccade.data.transforms.batch import window_grid
from saccade.data.transforms.mask import EvalPair
from saccade.data.transforms.mask_batch import PairAugment, distort_colours, hue_rotation, sample_nearest
from tests.data.transforms.pairs import agreement, corner_mask, encoded_pair

NO_NORM = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_pair_augment_changes_images_and_masks_alike():
    image, mask = encoded_pair()
    images = EvalPair()(image, mask)[0].repeat(16, 1, 1, 1)
    masks = torch.from_numpy(mask).repeat(16, 1, 1)
    augment = PairAugment(48, base=60, distort=False, **NO_NORM)
    pixels, labels = augment(images, masks, seeded())
    assert pixels.shape == (16, 3, 48, 48)
    assert labels.shape == (16, 48, 48)
    assert labels.dtype == torch.int64
    for image_pixels, image_labels in zip(pixels * 255, labels, strict=True):
        assert agreement(image_pixels, image_labels) > 0.85
    assert len({tuple(image_labels.flatten().tolist()) for image_labels in labels}) == 16, "own parameters per image"
    torch.testing.assert_close(augment(images, masks, seeded())[0], pixels)


def test_pair_augment_without_changes_is_the_identity():
    images, masks = EvalPair()(*encoded_pair(48, 48))
    augment = PairAugment(48, scale=(1.0, 1.0), flip=0.0, distort=False, **NO_NORM)
    pixels, labels = augment(images[None], masks[None], seeded())
    torch.testing.assert_close(pixels[0] * 255, images.float(), atol=0.01, rtol=0)
    assert torch.equal(labels[0], masks.long())


def test_pair_augment_pads_small_images_at_the_right_and_bottom():
    masks = torch.full((1, 20, 20), 3, dtype=torch.uint8)
    augment = PairAugment(40, base=20, scale=(1.0, 1.0), flip=0.0, distort=False, **NO_NORM)
    pixels, labels = augment(torch.full((1, 3, 20, 20), 255, dtype=torch.uint8), masks, seeded())
    inside = torch.zeros(40, 40, dtype=torch.bool)
    inside[:20, :20] = True
    assert torch.equal(labels[0] == 3, inside)
    assert torch.equal(labels[0] == IGNORE, ~inside)
    assert pixels[0, :, 21:].abs().max() == 0
    assert pixels[0, :, :, 21:].abs().max() == 0


def test_pair_augment_avoids_dominating_classes():
    masks = torch.from_numpy(corner_mask()).repeat(32, 1, 1)
    images = torch.zeros(32, 3, 100, 100, dtype=torch.uint8)
    options = dict(base=100, scale=(1.0, 1.0), flip=0.0, distort=False, **NO_NORM)
    _, unbalanced = PairAugment(32, max_class_fraction=1.0, attempts=1, **options)(images, masks, seeded())
    _, balanced = PairAugment(32, max_class_fraction=0.75, attempts=60, **options)(images, masks, seeded())
    assert ((unbalanced == 1).float().mean((1, 2)) > 0.2).float().mean() < 0.4
    fractions = (balanced == 1).float().mean((1, 2))
    assert (fractions.gt(0.2) & fractions.lt(0.8)).float().mean() > 0.95  # judged on a 16 x 16 grid


def test_pair_augment_windows_contain_two_classes_at_any_fraction():
    masks = torch.from_numpy(corner_mask()).repeat(32, 1, 1)
    images = torch.zeros(32, 3, 100, 100, dtype=torch.uint8)
    augment = PairAugment(
        32, base=100, scale=(1.0, 1.0), flip=0.0, distort=False, max_class_fraction=1.0, attempts=60, **NO_NORM
    )
    _, labels = augment(images, masks, seeded())
    assert all(len(image_labels.unique()) == 2 for image_labels in labels)


def test_flip_exchanges_left_and_right_classes():
    masks = torch.tensor([[[0, 1], [2, IGNORE]]], dtype=torch.uint8)
    augment = PairAugment(2, scale=(1.0, 1.0), flip=1.0, distort=False, flipped_classes=[0, 2, 1], **NO_NORM)
    _, labels = augment(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), masks, seeded())
    assert labels[0].tolist() == [[2, 0], [IGNORE, 1]]


def test_distort_colours_changes_15_of_16_images_and_stays_between_0_and_1():
    pixels = 0.2 + 0.6 * torch.rand(400, 3, 4, 4, generator=seeded(1))
    changed = distort_colours(pixels, seeded())
    assert changed.min() >= 0
    assert changed.max() <= 1
    fraction = ((changed - pixels).abs().flatten(1).amax(1) > 1e-3).float().mean()
    assert abs(float(fraction) - 15 / 16) < 0.05


def test_hue_rotation_is_a_rotation_that_leaves_greys_unchanged():
    matrices = hue_rotation(torch.tensor([0.0, 0.3, -0.3]))
    torch.testing.assert_close(matrices @ torch.ones(3), torch.ones(3, 3))
    torch.testing.assert_close(matrices[0], torch.eye(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrices[1] @ matrices[2], torch.eye(3), atol=1e-5, rtol=0)
    assert (matrices[1] - torch.eye(3)).abs().max() > 0.1


def test_sample_nearest_keeps_class_indices():
    masks = torch.tensor([[[0, 7], [200, IGNORE]]], dtype=torch.uint8)
    labels = sample_nearest(masks, window_grid(torch.eye(3)[None], 6))[0]
    expected = masks[0].repeat_interleave(3, 0).repeat_interleave(3, 1)
    assert labels.tolist() == expected.tolist()
