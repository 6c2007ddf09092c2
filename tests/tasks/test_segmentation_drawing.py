"""Overlays, palettes and areas of segmentations."""

import numpy as np
import torch
from PIL import Image

import saccade
from saccade.models.card import Card, Preprocess
from saccade.tasks.segmentation_drawing import class_areas, class_colours, colour_labels, overlay_labels, palette_image

LABELS = np.array([[0, 0, 1], [0, 255, 1]], np.uint8)
COLOURS = np.array([[200, 0, 0], [0, 100, 0]], np.uint8)


def test_colours_depend_on_the_index_only_and_differ():
    colours = class_colours(150)
    assert (colours.shape, colours.dtype) == ((150, 3), np.uint8)
    np.testing.assert_array_equal(class_colours(20), colours[:20])
    assert len({tuple(colour) for colour in colours.tolist()}) == 150
    gaps = np.linalg.norm(colours[:10, None].astype(float) - colours[None, :10], axis=-1)
    assert gaps[~np.eye(10, dtype=bool)].min() > 40


def test_colour_labels_are_black_where_unlabelled():
    coloured = colour_labels(LABELS, COLOURS)
    np.testing.assert_array_equal(coloured[:, 2], [[0, 100, 0]] * 2)
    np.testing.assert_array_equal(coloured[1, 1], [0, 0, 0])


def test_overlay_blends_and_darkens_borders():
    image = np.full((2, 3, 3), 100, np.uint8)
    drawn = overlay_labels(image, LABELS, COLOURS, 0.5)
    np.testing.assert_array_equal(drawn[0, 0], [150, 50, 50])
    np.testing.assert_array_equal(drawn[1, 0], [150, 50, 50])
    np.testing.assert_array_equal(drawn[0, 2], np.round([0.35 * 50, 0.35 * 100, 0.35 * 50]))  # left of it is class 0
    np.testing.assert_array_equal(drawn[1, 1], [35, 35, 35])  # unlabelled: the image, darkened as a border


def test_overlay_accepts_an_integer_strength():
    image = np.full((2, 2, 3), 100, np.uint8)
    labels = np.zeros((2, 2), np.uint8)
    np.testing.assert_array_equal(overlay_labels(image, labels, COLOURS, 1), np.tile(COLOURS[0], (2, 2, 1)))
    np.testing.assert_array_equal(overlay_labels(image, labels, COLOURS, 0), image)


def test_palette_image_has_indices_as_values():
    image = palette_image(LABELS, COLOURS)
    assert image.mode == "P"
    np.testing.assert_array_equal(np.asarray(image), LABELS)
    np.testing.assert_array_equal(np.asarray(image.convert("RGB")), colour_labels(LABELS, COLOURS))


def test_class_areas_are_sorted_and_omit_absent_classes():
    assert class_areas(LABELS, ["road", "sky", "tree"]) == [
        {"class": 0, "name": "road", "pixels": 3, "share": 3 / 6},
        {"class": 1, "name": "sky", "pixels": 2, "share": 2 / 6},
    ]


def test_more_than_256_classes_keep_their_indices_in_16_bits(tmp_path):
    labels = np.array([[0, 255], [256, 299]], np.uint16)
    colours = class_colours(300)
    palette_image(labels, colours).save(tmp_path / "labels.png")
    with Image.open(tmp_path / "labels.png") as image:
        assert np.array_equal(np.asarray(image), labels)
    assert np.array_equal(colour_labels(labels, colours), colours[labels])
    overlay = overlay_labels(np.zeros((2, 2, 3), np.uint8), labels, colours, strength=1.0)
    assert overlay[0, 1].any()  # 255 is a class here, not unlabelled


def test_predicted_classes_beyond_255_do_not_wrap():
    class Constant(torch.nn.Module):
        card = Card("constant", 300, {}, [f"class {index}" for index in range(300)], Preprocess(32), "segmentation")

        def forward(self, images):
            return torch.nn.functional.one_hot(torch.full(images.shape[:1] + images.shape[2:], 299), 300).movedim(-1, 1)

    (prediction,) = saccade.predict(Constant(), np.zeros((32, 32, 3), np.uint8))
    assert prediction.labels.min() == 299
