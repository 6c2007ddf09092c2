"""Batched augmentation: exact where it should be, within its ranges where it is random, each picture by itself."""

import math

import pytest
import torch

from saccade.data.transforms.batch import (
    GEOMETRIC_OPS,
    OPS,
    BatchAugment,
    Policy,
    affine,
    apply_colour_ops,
    equalize,
    geometric_map,
    normalize,
    random_erase,
    resize,
    sample_bilinear,
    window_grid,
)

PLAIN = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


def pictures(count: int, side: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_without_any_change_pictures_are_only_normalised():
    images, mean, std = pictures(3), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    found = BatchAugment(16, mean, std, crop="none", flip=0)(images, dice())
    torch.testing.assert_close(found, normalize(images / 255, mean, std), atol=1e-5, rtol=0)


def test_padded_crop_moves_by_whole_pixels_within_its_reach():
    images = pictures(200)
    found = BatchAugment(16, crop="pad", pad=0.125, flip=0, **PLAIN)(images, dice())
    padded = torch.nn.functional.pad(images / 255, (2, 2, 2, 2))
    shifts = set()
    for picture, before in zip(found, padded, strict=True):
        places = [(y, x) for y in range(5) for x in range(5)]
        close = [p for p in places if torch.allclose(picture, before[:, p[0] : p[0] + 16, p[1] : p[1] + 16], atol=1e-4)]
        assert len(close) == 1, "every result is a shifted window of its picture"
        shifts.add(close[0])
    assert len(shifts) == 25, "all shifts occur"


def test_half_of_the_pictures_are_mirrored():
    images = pictures(400, 4)
    found = BatchAugment(4, crop="none", flip=0.5, **PLAIN)(images, dice())
    same = [torch.allclose(a, b / 255, atol=1e-4) for a, b in zip(found, images, strict=True)]
    mirrored = [torch.allclose(a, b.flip(2) / 255, atol=1e-4) for a, b in zip(found, images, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True))
    assert 160 < sum(mirrored) < 240


def test_resized_crop_stays_inside_and_keeps_its_area():
    """On a picture whose red is x and green is y, corners of the result tell the window."""
    side, line = 64, (torch.arange(64) + 0.5) / 64
    ramp = torch.stack([line.expand(side, side), line[:, None].expand(side, side), torch.zeros(side, side)])
    augment = BatchAugment(64, crop="resized", scale=(0.3, 0.6), ratio=(3 / 4, 4 / 3), flip=0, **PLAIN)
    images = (ramp * 255).round().byte().expand(300, -1, -1, -1)
    found = augment(images, dice())
    wide = (found[:, 0, 32, 62] - found[:, 0, 32, 1]) * 64 / 61
    tall = (found[:, 1, 62, 32] - found[:, 1, 1, 32]) * 64 / 61
    assert (wide * tall).min() > 0.28
    assert (wide * tall).max() < 0.63
    assert (wide / tall).min() > 0.72
    assert (wide / tall).max() < 1.4
    assert found[:, :2].min() > 0.005, "never beyond the edge"


def test_the_output_may_have_another_size():
    images = pictures(2, 16)
    found = BatchAugment(48, crop="none", flip=0, **PLAIN)(images, dice())
    expected = torch.nn.functional.interpolate(images / 255, 48, mode="bilinear", align_corners=False)
    torch.testing.assert_close(found[:, :, 3:-3, 3:-3], expected[:, :, 3:-3, 3:-3], atol=1e-4, rtol=0)
    assert resize(images / 255, 16) is not None
    assert resize(images / 255, 40).shape == (2, 3, 40, 40)


def test_the_same_dice_give_the_same_batch_and_others_another():
    augment = BatchAugment(16, policy=Policy.parse("rand-m9-n2-mstd0.5"), jitter=0.4, **PLAIN)
    images = pictures(8)
    torch.testing.assert_close(augment(images, dice(1)), augment(images, dice(1)), atol=0, rtol=0)
    assert (augment(images, dice(1)) - augment(images, dice(2))).abs().mean() > 0.05


def test_it_compiles_without_a_break_to_the_same_pictures():
    augment = BatchAugment(24, policy=Policy.parse("rand-m9-n2"), jitter=0.4, **PLAIN)
    images, draws = pictures(16), augment.sample_parameters(16, torch.device("cpu"), dice())
    compiled = torch.compile(augment.apply, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, draws), augment.apply(images, draws))


def test_colour_and_geometry_touch_only_the_pictures_they_were_chosen_for():
    images, strength = pictures(len(OPS)) / 255, torch.full((len(OPS),), 0.7)
    chosen = torch.arange(len(OPS))
    changed = (apply_colour_ops(images, chosen, strength) - images).abs().flatten(1).amax(1) > 1e-6
    moved = (geometric_map(chosen, strength) - torch.eye(3)).abs().flatten(1).amax(1) > 1e-6
    for operation, colour, place in zip(OPS, changed, moved, strict=True):
        assert bool(place) == (operation in GEOMETRIC_OPS)
        assert bool(colour) == (operation not in (*GEOMETRIC_OPS, "identity"))


def test_rotation_and_shear_and_translation_are_the_maps_their_names_say():
    strength = torch.tensor([1.0])

    def of(name):
        return geometric_map(torch.tensor([OPS.index(name)]), strength)[0]

    turn = math.radians(30)
    expected = torch.tensor([[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1]])
    torch.testing.assert_close(of("rotate"), expected)
    torch.testing.assert_close(of("shear_x"), torch.tensor([[1, 0.3, 0], [0, 1, 0], [0, 0, 1.0]]))
    torch.testing.assert_close(of("translate_y"), torch.tensor([[1, 0, 0], [0, 1, 0.9], [0, 0, 1.0]]))


def test_sampling_a_quarter_turn_is_a_quarter_turn():
    images = pictures(1) / 255
    quarter = affine(torch.zeros(1), -1.0, 0.0, 1.0, 0.0, 0.0)
    torch.testing.assert_close(
        sample_bilinear(images, window_grid(quarter, 16)), images.rot90(1, (2, 3)), atol=1e-5, rtol=0
    )


def test_equalising_is_the_rank_of_every_value():
    images = pictures(2, 8) / 255
    found = equalize(images)
    for i in range(2):
        for c in range(3):
            values = images[i, c].flatten()
            ranks = torch.stack([(values <= value).float().mean() for value in values])
            torch.testing.assert_close(found[i, c].flatten(), ranks)


def test_colour_operations_keep_pictures_between_0_and_1():
    images = pictures(len(OPS) * 4) / 255
    chosen = torch.arange(len(OPS)).repeat(4)
    for power in (-1.0, -0.3, 0.5, 1.0):
        found = apply_colour_ops(images, chosen, torch.full((len(chosen),), power))
        assert found.min() >= -1e-6
        assert found.max() <= 1 + 1e-6


def test_erasing_hits_its_share_of_pictures_and_of_area():
    images = torch.full((2000, 3, 32, 32), 7.0)
    found = random_erase(images, 0.25, dice())
    holes = (found != 7).all(1).float().mean((1, 2))
    assert 0.21 < (holes > 0).float().mean() < 0.29
    hit = holes[holes > 0]
    assert hit.max() < 0.36
    assert 0.12 < hit.mean() < 0.22
    noise = found[found != 7]
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("trivial", Policy(1, None)),
        ("rand-m9-mstd0.5-inc1", Policy(2, 0.9, 0.05)),
        ("rand-m7-n3", Policy(3, 0.7)),
    ],
)
def test_policies_in_timm_s_spelling(text, expected):
    assert Policy.parse(text) == expected


def test_a_policy_for_single_pictures_is_refused():
    with pytest.raises(ValueError, match="expected 'trivial'"):
        Policy.parse("original")
