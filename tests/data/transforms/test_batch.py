"""Augmentation of whole batches: exact results for fixed parameters, and ranges of the random ones."""

import math

import pytest
import torch

from saccade.data.transforms.batch import (
    GEOMETRIC_OPS,
    OPS,
    BatchAugment,
    MultiHotMixup,
    Policy,
    affine,
    apply_colour_ops,
    autocontrast,
    blend,
    equalize,
    geometric_map,
    normalize,
    posterize,
    random_erase,
    resize,
    sample_bilinear,
    solarize,
    window_grid,
)

NO_NORM = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


def random_images(count: int, side: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_augment_without_changes_only_normalizes():
    images, mean, std = random_images(3), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    result = BatchAugment(16, mean, std, crop="none", flip=0)(images, seeded())
    torch.testing.assert_close(result, normalize(images / 255, mean, std), atol=1e-5, rtol=0)


def test_normalize_subtracts_mean_and_divides_by_std_per_channel():
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    images, clips = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 5, 4, 4)
    for channel in range(3):
        expected = (images[:, channel] - mean[channel]) / std[channel]
        torch.testing.assert_close(normalize(images, mean, std)[:, channel], expected)
        torch.testing.assert_close(normalize(images[0], mean, std)[channel], expected[0])
        expected = (clips[:, channel] - mean[channel]) / std[channel]
        torch.testing.assert_close(normalize(clips, mean, std)[:, channel], expected)


def test_padded_crop_shifts_by_whole_pixels_within_the_padding():
    images = random_images(200)
    result = BatchAugment(16, crop="pad", pad=0.125, flip=0, **NO_NORM)(images, seeded())
    padded = torch.nn.functional.pad(images / 255, (2, 2, 2, 2))
    shifts = set()
    for image, original in zip(result, padded, strict=True):
        matches = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.allclose(image, original[:, y : y + 16, x : x + 16], atol=1e-4)
        ]
        assert len(matches) == 1
        shifts.add(matches[0])
    assert len(shifts) == 25, "all shifts of -2 to 2 px occur"


@pytest.mark.parametrize(("flip", "expected"), [(0.0, 0), (0.5, 200), (1.0, 400)])
def test_flip_mirrors_the_given_fraction_of_images(flip, expected):
    images = random_images(400, 4)
    result = BatchAugment(4, crop="none", flip=flip, **NO_NORM)(images, seeded())
    same = [torch.allclose(a, b / 255, atol=1e-4) for a, b in zip(result, images, strict=True)]
    mirrored = [torch.allclose(a, b.flip(2) / 255, atol=1e-4) for a, b in zip(result, images, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True))
    assert sum(mirrored) == pytest.approx(expected, abs=40 if 0 < flip < 1 else 0)  # 4 standard deviations


def test_resized_crop_respects_area_and_aspect_ratio_and_stays_inside():
    """Red encodes x and green y, so two pixels of the result give the window."""
    side, axis = 64, (torch.arange(64) + 0.5) / 64
    ramp = torch.stack([axis.expand(side, side), axis[:, None].expand(side, side), torch.zeros(side, side)])
    augment = BatchAugment(64, crop="resized", scale=(0.3, 0.6), ratio=(3 / 4, 4 / 3), flip=0, **NO_NORM)
    result = augment((ramp * 255).round().byte().expand(300, -1, -1, -1), seeded())
    width = (result[:, 0, 32, 62] - result[:, 0, 32, 1]) * 64 / 61
    height = (result[:, 1, 62, 32] - result[:, 1, 1, 32]) * 64 / 61
    area, aspect = width * height, width / height
    assert [area.min(), area.max()] == pytest.approx([0.3, 0.6], abs=0.03)
    assert [aspect.min(), aspect.max()] == pytest.approx([3 / 4, 4 / 3], abs=0.06)
    assert result[:, :2].min() > 0.005, "outside the image it would be 0"


def test_output_size_may_differ_from_input_size():
    images = random_images(2, 16)
    result = BatchAugment(48, crop="none", flip=0, **NO_NORM)(images, seeded())
    expected = torch.nn.functional.interpolate(images / 255, 48, mode="bilinear", align_corners=False)
    torch.testing.assert_close(result[:, :, 3:-3, 3:-3], expected[:, :, 3:-3, 3:-3], atol=1e-4, rtol=0)


def test_resize_is_bicubic_with_antialiasing_and_frame_by_frame():
    images, clips = torch.rand(2, 3, 16, 16), torch.rand(2, 3, 4, 16, 16)
    assert resize(images, 16) is images
    expected = torch.nn.functional.interpolate(images, (40, 40), mode="bicubic", antialias=True)
    torch.testing.assert_close(resize(images, 40), expected)
    torch.testing.assert_close(resize(clips, 9)[:, :, 2], resize(clips[:, :, 2], 9))


def test_generator_determines_the_batch():
    augment = BatchAugment(16, policy=Policy.parse("rand-m9-n2-mstd0.5"), jitter=0.4, **NO_NORM)
    images = random_images(8)
    torch.testing.assert_close(augment(images, seeded(1)), augment(images, seeded(1)), atol=0, rtol=0)
    assert (augment(images, seeded(1)) - augment(images, seeded(2))).abs().mean() > 0.05


def test_apply_compiles_without_graph_break_to_the_same_images():
    augment = BatchAugment(24, policy=Policy.parse("rand-m9-n2"), jitter=0.4, **NO_NORM)
    images, parameters = random_images(16), augment.sample_parameters(16, torch.device("cpu"), seeded())
    compiled = torch.compile(augment.apply, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, parameters), augment.apply(images, parameters))


def test_apply_combines_jitter_colour_and_geometric_operations():
    augment = BatchAugment(16, crop="none", flip=0, jitter=0.5, policy=Policy(1, 0.9), **NO_NORM)
    images, magnitude = random_images(2), torch.tensor([0.4, 0.5])
    op = torch.tensor([OPS.index("solarize"), OPS.index("rotate")])
    jitter = torch.tensor([[1.0, 1.0], [0.5, 0.5], [0.5, 0.5]])  # brightness times 1.5, the others unchanged
    result = augment.apply(images, [torch.zeros(5, 2), jitter, op, magnitude])
    bright = (images / 255 * 1.5).clamp(max=1)
    torch.testing.assert_close(result[:1], solarize(bright[:1], magnitude[:1]), atol=1e-4, rtol=0)
    grid = window_grid(geometric_map(op, magnitude)[1:], 16)
    torch.testing.assert_close(result[1:], sample_bilinear(bright[1:], grid), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("policy", "mean", "std"),
    [(Policy(1, 0.5, 0.1), 0.5, 0.1), (Policy(1, 0.5), 0.5, 0), (Policy(1, None), 0.5, 0.289)],
)
def test_magnitudes_follow_the_policy_with_random_sign(policy, mean, std):
    augment = BatchAugment(16, policy=policy, **NO_NORM)
    magnitude = augment.sample_parameters(4000, torch.device("cpu"), seeded())[3]
    assert [magnitude.abs().mean(), magnitude.abs().std()] == pytest.approx([mean, std], abs=0.02)
    assert (magnitude > 0).float().mean() == pytest.approx(0.5, abs=0.04)


def test_each_image_gets_only_its_own_operation():
    images, magnitude = random_images(len(OPS)) / 255, torch.full((len(OPS),), 0.7)
    op = torch.arange(len(OPS))
    recoloured = (apply_colour_ops(images, op, magnitude) - images).abs().flatten(1).amax(1) > 1e-6
    moved = (geometric_map(op, magnitude) - torch.eye(3)).abs().flatten(1).amax(1) > 1e-6
    for name, has_colour, has_geometry in zip(OPS, recoloured, moved, strict=True):
        assert bool(has_geometry) == (name in GEOMETRIC_OPS)
        assert bool(has_colour) == (name not in (*GEOMETRIC_OPS, "identity"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rotate", [[math.cos(math.pi / 6), -0.5, 0], [0.5, math.cos(math.pi / 6), 0], [0, 0, 1]]),
        ("shear_x", [[1, 0.3, 0], [0, 1, 0], [0, 0, 1]]),
        ("shear_y", [[1, 0, 0], [0.3, 1, 0], [0, 0, 1]]),
        ("translate_x", [[1, 0, 0.9], [0, 1, 0], [0, 0, 1]]),
        ("translate_y", [[1, 0, 0], [0, 1, 0.9], [0, 0, 1]]),
        ("identity", [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    ],
)
def test_geometric_map_at_full_magnitude(name, expected):
    result = geometric_map(torch.tensor([OPS.index(name)]), torch.ones(1))
    torch.testing.assert_close(result[0], torch.tensor(expected, dtype=torch.float32))


def test_sampling_a_quarter_turn_equals_rot90():
    images = random_images(1) / 255
    grid = window_grid(affine(torch.zeros(1), -1.0, 0.0, 1.0, 0.0, 0.0), 16)
    torch.testing.assert_close(sample_bilinear(images, grid), images.rot90(1, (2, 3)), atol=1e-5, rtol=0)


def test_equalize_returns_the_rank_of_every_value():
    images = random_images(2, 8) / 255
    result = equalize(images)
    for i in range(2):
        for c in range(3):
            values = images[i, c].flatten()
            ranks = torch.stack([(values <= value).float().mean() for value in values])
            torch.testing.assert_close(result[i, c].flatten(), ranks)


def test_colour_operations_match_their_definitions():
    image = torch.tensor([0.2, 0.4, 0.6]).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    grey = 0.299 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6
    factor = torch.tensor([0.5])

    def pixel(result: torch.Tensor) -> list[float]:
        return result[0, :, 0, 0].tolist()

    assert pixel(blend(image, "brightness", factor)) == pytest.approx([0.1, 0.2, 0.3])
    assert pixel(blend(image, "saturation", factor)) == pytest.approx([(grey + v) / 2 for v in (0.2, 0.4, 0.6)])
    assert pixel(blend(image, "sharpness", factor)) == pytest.approx([0.2, 0.4, 0.6])
    assert pixel(solarize(image, factor)) == pytest.approx([0.2, 0.4, 0.4])
    levels = torch.tensor([51, 102, 153]).view(1, 3, 1, 1) / 255
    assert pixel(posterize(levels, torch.ones(1)) * 255) == pytest.approx([48, 96, 144])  # 4 bits: multiples of 16
    ramp = torch.tensor([0.2, 0.3, 0.4, 0.6]).view(1, 1, 2, 2).expand(1, 3, 2, 2)
    assert autocontrast(ramp)[0, 0].flatten().tolist() == pytest.approx([0, 0.25, 0.5, 1])
    contrast = blend(ramp, "contrast", factor)[0, 0].flatten().tolist()
    assert contrast == pytest.approx([(0.375 + v) / 2 for v in (0.2, 0.3, 0.4, 0.6)])


@pytest.mark.parametrize("magnitude", [-1.0, -0.3, 0.5, 1.0])
def test_colour_operations_stay_between_0_and_1(magnitude):
    op = torch.arange(len(OPS)).repeat(4)
    result = apply_colour_ops(random_images(len(op)) / 255, op, torch.full((len(op),), magnitude))
    assert result.min() >= -1e-6
    assert result.max() <= 1 + 1e-6


def test_random_erase_fills_a_fraction_of_images_and_area_with_unit_noise():
    images = torch.full((2000, 3, 32, 32), 7.0)
    result = random_erase(images, 0.25, seeded())
    area = (result != 7).all(1).float().mean((1, 2))
    assert (area > 0).float().mean() == pytest.approx(0.25, abs=0.04)
    assert 1 / 3 - 0.03 < area.max() < 1 / 3 + 0.03  # area is uniform in [0.02, 1/3]
    assert area[area > 0].mean() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.02)
    noise = result[result != 7]
    assert [noise.mean(), noise.std()] == pytest.approx([0, 1], abs=0.02)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("trivial", Policy(1, None)),
        ("rand-m9-mstd0.5-inc1", Policy(2, 0.9, 0.05)),
        ("rand-m7-n3", Policy(3, 0.7)),
    ],
)
def test_policy_parses_timm_notation(text, expected):
    assert Policy.parse(text) == expected


def test_policy_rejects_policies_for_single_images():
    with pytest.raises(ValueError, match=r"expected 'trivial', 'rand-m9-n2' or '' .*, got 'original'"):
        Policy.parse("original")


def test_multi_hot_mixup_mixes_images_and_labels_in_one_ratio():
    images, labels = torch.eye(4).view(4, 1, 2, 2).clone(), torch.tensor([[1.0, 1], [0, 1], [0, 0], [1, 0]])
    mixed, targets = MultiHotMixup(0.8, 0.0, num_classes=2)(images, labels)
    ratio = mixed[0, 0, 0, 0]
    assert 0 < ratio < 1
    torch.testing.assert_close(mixed[3, 0, 0, 0], 1 - ratio)
    torch.testing.assert_close(targets, ratio * labels + (1 - ratio) * labels.flip(0))
