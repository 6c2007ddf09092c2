"""The batched transform against torchvision's."""

import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from saccade.tasks import batch_transform
from saccade.tasks.batch_transform import BatchTransform

SETTINGS = dict(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4])


def make_batch(sizes: list[tuple[int, int]], masks: bool = True):
    rng = torch.Generator().manual_seed(0)
    images = [torch.rand(3, *size, generator=rng) for size in sizes]
    targets = []
    for i, (height, width) in enumerate(sizes):
        corners = torch.rand(i, 2, generator=rng) * min(height, width) / 2
        target = {"boxes": torch.cat([corners, corners + 5], 1), "labels": torch.arange(i), "image_id": torch.tensor(i)}
        if masks:
            target["masks"] = (torch.rand(i, height, width, generator=rng) > 0.5).to(torch.uint8)
        targets.append(target)
    return images, targets


def both(sizes: list[tuple[int, int]], training: bool, min_size=(50,), with_targets: bool = True, masks: bool = True):
    results = []
    for kind in (BatchTransform, GeneralizedRCNNTransform):
        torch.manual_seed(0)
        images, targets = make_batch(sizes, masks)
        transform = kind(min_size, 90, **SETTINGS).train(training)
        results.append(transform(images, targets if with_targets else None))
        assert "boxes" not in targets[0] or targets[0]["boxes"].shape == (0, 4)
    return results


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("sizes", [[(40, 30)] * 4, [(32, 120)] * 2, [(40, 30), (30, 40)], [(33, 33)]])
@pytest.mark.parametrize("masks", [False, True])
def test_batched_transform_equals_torchvisions(training, with_targets, sizes, masks):
    (ours, our_targets), (theirs, their_targets) = both(sizes, training, with_targets=with_targets, masks=masks)
    assert ours.image_sizes == theirs.image_sizes
    torch.testing.assert_close(ours.tensors, theirs.tensors)
    assert (our_targets is None) == (their_targets is None)
    for a, b in zip(our_targets or [], their_targets or [], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], msg=key)


def test_sampled_sizes_and_huge_masks_are_not_batched(monkeypatch):
    images, targets = make_batch([(40, 30)] * 3)
    transform = BatchTransform((50,), 90, **SETTINGS).train()
    assert transform.can_batch(images, targets)
    assert not BatchTransform((50, 60), 90, **SETTINGS).train().can_batch(images, targets)
    assert BatchTransform((50, 60), 90, **SETTINGS).eval().can_batch(images, targets)
    monkeypatch.setattr(batch_transform, "MAX_BATCHED_MASK_PIXELS", 100)
    assert not transform.can_batch(images, targets)
