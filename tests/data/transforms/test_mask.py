"""Pictures and masks stay together, whatever is done to them: one by one, and in batches."""

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.data.sources.masks import IGNORE
from saccade.data.transforms.batch import window_grid
from saccade.data.transforms.mask import BalancedCrop, EvalPair, RandomClassFlip, TrainPair
from saccade.data.transforms.mask_batch import PairAugment, distort_colours, hue_rotation, sample_nearest

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def telling_pair(height=60, width=80):
    """A picture whose red says the class of every pixel: 50 levels apart, in smooth blobs."""
    y, x = np.mgrid[:height, :width]
    mask = ((y // 20 + x // 20) % 4).astype(np.uint8)
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = mask * 50 + 20
    return Image.fromarray(image), mask


def agreement(pixels, labels):
    """Share of labelled pixels whose red still names their class; edges blur when the picture is resized."""
    red, kept = pixels[..., 0, :, :].float(), labels != IGNORE
    said = ((red - 20) / 50).round()
    return (said[kept] == labels[kept]).float().mean().item()


@pytest.mark.parametrize("seed", range(4))
def test_one_by_one_picture_and_mask_stay_together(seed):
    torch.manual_seed(seed)
    pixels, labels = TrainPair(48, base=60, distort=False)(*telling_pair())
    assert pixels.shape == (3, 48, 48)
    assert labels.shape == (48, 48)
    assert labels.dtype == pixels.dtype == torch.uint8
    assert set(labels.unique().tolist()) <= {0, 1, 2, 3, IGNORE}
    assert agreement(pixels, labels) > 0.85


def test_in_a_batch_picture_and_mask_stay_together():
    image, mask = telling_pair()
    images = EvalPair()(image, mask)[0].repeat(16, 1, 1, 1)
    masks = torch.from_numpy(mask).repeat(16, 1, 1)
    augment = PairAugment(48, base=60, distort=False, **PLAIN)
    pixels, labels = augment(images, masks, torch.Generator().manual_seed(0))
    assert pixels.shape == (16, 3, 48, 48)
    assert labels.shape == (16, 48, 48)
    assert labels.dtype == torch.int64
    for own_pixels, own_labels in zip(pixels * 255, labels, strict=True):
        assert agreement(own_pixels, own_labels) > 0.85
    assert len({tuple(own.flatten().tolist()) for own in labels}) == 16  # every picture in its own way
    again = augment(images, masks, torch.Generator().manual_seed(0))
    torch.testing.assert_close(again[0], pixels)


def test_without_change_a_batch_is_itself():
    image, mask = telling_pair(48, 48)
    images, masks = EvalPair()(image, mask)
    augment = PairAugment(48, scale=(1.0, 1.0), flip=0.0, distort=False, **PLAIN)
    pixels, labels = augment(images[None], masks[None], torch.Generator().manual_seed(0))
    torch.testing.assert_close(pixels[0] * 255, images.float(), atol=0.01, rtol=0)
    assert torch.equal(labels[0], masks.long())


def test_beyond_the_edge_nothing_is_labelled():
    masks = torch.full((1, 20, 20), 3, dtype=torch.uint8)
    augment = PairAugment(40, base=20, scale=(1.0, 1.0), flip=0.0, distort=False, **PLAIN)
    pixels, labels = augment(
        torch.full((1, 3, 20, 20), 255, dtype=torch.uint8), masks, torch.Generator().manual_seed(0)
    )
    assert (labels[0, :20, :20] == 3).all()  # padded at the right and bottom, as one by one
    assert (labels[0, 20:] == IGNORE).all()
    assert (labels[0, :, 20:] == IGNORE).all()
    assert pixels[0, :, 21:].abs().max() == 0
    torch.manual_seed(0)
    single, own = TrainPair(40, base=20, scale=(1.0, 1.0), flip=0.0, distort=False, mean=(0, 0, 0))(
        Image.new("RGB", (20, 20), "white"), masks[0].numpy()
    )
    assert torch.equal(own.long(), labels[0])
    assert single[:, 20:].max() == 0


def sparse_mask():
    """Class 1 lives in one corner of a large field of class 0."""
    mask = np.zeros((100, 100), np.uint8)
    mask[:30, :30] = 1
    return mask


def test_crops_are_balanced_one_by_one():
    crop, mask = BalancedCrop(32, max_class_fraction=0.75, attempts=200), torch.from_numpy(sparse_mask())
    from torchvision import tv_tensors

    torch.manual_seed(0)
    shares = [float((crop(tv_tensors.Mask(mask)) == 1).float().mean()) for _ in range(10)]
    assert all(0.25 <= share <= 0.75 for share in shares)


def test_crops_are_balanced_in_a_batch():
    masks = torch.from_numpy(sparse_mask()).repeat(32, 1, 1)
    images = torch.zeros(32, 3, 100, 100, dtype=torch.uint8)
    dice = torch.Generator().manual_seed(0)
    options = dict(base=100, scale=(1.0, 1.0), flip=0.0, distort=False, **PLAIN)
    _, free = PairAugment(32, max_class_fraction=1.0, attempts=1, **options)(images, masks, dice)
    _, balanced = PairAugment(32, max_class_fraction=0.75, attempts=60, **options)(images, masks, dice)
    assert ((free == 1).float().mean((1, 2)) > 0.2).float().mean() < 0.4
    shares = (balanced == 1).float().mean((1, 2))
    assert (shares.gt(0.2) & shares.lt(0.8)).float().mean() > 0.95


def test_a_mirror_exchanges_left_and_right():
    swap = [0, 2, 1]
    mask = torch.tensor([[0, 1, 1], [2, 0, IGNORE]], dtype=torch.uint8)
    from torchvision import tv_tensors

    flipped = RandomClassFlip(1.0, swap)(tv_tensors.Mask(mask))
    assert torch.equal(flipped.as_subclass(torch.Tensor), torch.tensor([[2, 2, 0], [IGNORE, 0, 1]], dtype=torch.uint8))
    square = torch.tensor([[0, 1], [2, IGNORE]], dtype=torch.uint8)
    augment = PairAugment(2, scale=(1.0, 1.0), flip=1.0, distort=False, flipped_classes=swap, **PLAIN)
    _, labels = augment(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), square[None], torch.Generator().manual_seed(0))
    assert labels[0].tolist() == [[2, 0], [IGNORE, 1]]


def test_colours_change_and_greys_keep_their_hue():
    pixels = torch.rand(64, 3, 4, 4)
    changed = distort_colours(pixels, torch.Generator().manual_seed(0))
    assert changed.min() >= 0
    assert changed.max() <= 1
    moved = (changed - pixels).abs().flatten(1).amax(1) > 1e-3
    assert 0.8 < moved.float().mean() < 1  # 1 in 16 pictures keeps all four
    turned = hue_rotation(torch.tensor([0.0, 0.3, -0.3]))
    torch.testing.assert_close(turned @ torch.ones(3), torch.ones(3, 3))
    torch.testing.assert_close(turned[0], torch.eye(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[1] @ turned[2], torch.eye(3), atol=1e-5, rtol=0)


def test_masks_are_read_by_their_nearest_pixel():
    masks = torch.tensor([[[0, 7], [200, IGNORE]]], dtype=torch.uint8)
    seen = sample_nearest(masks, window_grid(torch.eye(3)[None], 6))
    assert set(seen.unique().tolist()) == {0, 7, 200, IGNORE}
    assert (seen[0, :3, 3:] == 7).all()
