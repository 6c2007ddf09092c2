"""Drawing of detections."""

import numpy as np
import torch
from PIL import Image

from saccade.tasks.detection_drawing import describe_detections, draw_detections, object_colour

PREDICTION = {
    "boxes": torch.tensor([[10.0, 10, 40, 30], [50, 40, 90, 70], [0, 0, 5, 5]]),
    "labels": torch.tensor([2, 1, 1]),
    "scores": torch.tensor([0.6, 0.9, 0.2]),
    "masks": torch.zeros(3, 1, 80, 100),
}
PREDICTION["masks"][0, 0, 12:20, 12:30] = 0.8
GREY = Image.new("RGB", (100, 80), (100, 100, 100))


def test_only_box_outlines_and_masks_change():
    drawn = np.asarray(draw_detections(GREY, PREDICTION, ["cat", "dog"], names=False)).astype(int)
    changed = (drawn != 100).any(-1)
    expected = np.zeros((80, 100), bool)
    for x0, y0, x1, y1 in ((10, 10, 40, 30), (50, 40, 90, 70)):
        expected[[y0, y1], x0 : x1 + 1] = True
        expected[y0 : y1 + 1, [x0, x1]] = True
    expected[12:20, 12:30] = True
    np.testing.assert_array_equal(changed, expected)
    assert tuple(drawn[10, 10]) == object_colour(2)
    assert tuple(drawn[40, 60]) == object_colour(1)
    mixed = 100 + 0.45 * (np.array(object_colour(2)) - 100)
    np.testing.assert_allclose(drawn[15, 15], mixed, atol=1)


def test_detections_below_the_threshold_are_not_drawn():
    assert draw_detections(GREY, PREDICTION, threshold=0.95).tobytes() == GREY.tobytes()
    low = np.asarray(draw_detections(GREY, PREDICTION, threshold=0.1, names=False))
    assert (low[0, 0] != 100).any()


def test_one_class_has_a_colour_per_object_and_text_is_omitted_if_crowded():
    """31 names would cover a small image, but not a large one."""
    boxes = torch.tensor([[2.0 * i, 2.0 * i, 2.0 * i + 10, 2.0 * i + 10] for i in range(31)])
    many = {"boxes": boxes, "labels": torch.ones(31).long(), "scores": torch.full((31,), 0.9)}
    drawn = draw_detections(GREY, many, ["nucleus"])
    assert drawn.tobytes() == draw_detections(GREY, many, ["nucleus"], names=False).tobytes()
    assert drawn.getpixel((0, 0)) != drawn.getpixel((60, 60)) != (100, 100, 100)
    large = GREY.resize((1000, 800))
    drawn = draw_detections(large, many, ["nucleus"])
    assert drawn.tobytes() != draw_detections(large, many, ["nucleus"], names=False).tobytes()


def test_text_is_above_its_box():
    with_name = np.asarray(draw_detections(GREY, PREDICTION, ["cat", "dog"], names=True))
    without = np.asarray(draw_detections(GREY, PREDICTION, ["cat", "dog"], names=False))
    rows = np.flatnonzero((with_name != without).any((1, 2)))
    assert rows.min() >= 0
    assert set(range(30, 40)) & set(rows.tolist())  # above the lower box


def test_description_is_sorted_by_score():
    entries = describe_detections(PREDICTION, ["cat", "dog"])
    assert [(entry["name"], entry["index"]) for entry in entries] == [("cat", 1), ("dog", 0), ("cat", 2)]
    assert entries[0]["box"] == [50.0, 40.0, 90.0, 70.0]
    assert describe_detections(PREDICTION)[0]["name"] == "1"
    empty = {key: value[:0] for key, value in PREDICTION.items()}
    assert describe_detections(empty) == []
    assert draw_detections(GREY, empty).tobytes() == GREY.tobytes()


def test_text_at_the_right_edge_is_moved_into_the_image():
    """The same text covers the same number of pixels wherever its box is."""
    prediction = {"labels": torch.tensor([1]), "scores": torch.tensor([0.9])}
    inked = []
    for x in (40.0, 180.0):
        drawn = draw_detections(
            Image.new("RGB", (200, 100)),
            prediction | {"boxes": torch.tensor([[x, 50, x + 15, 65]])},
            ["nucleus"],
            names=True,
        )
        inked.append((np.asarray(drawn)[:50] != 0).any(2).sum())
    assert inked[0] == inked[1] > 300


def test_text_does_not_cover_text_of_a_higher_score():
    from saccade.tasks.detection_drawing import _place_text

    size, image_size = (20, 10), (100, 100)
    above = _place_text(size, (30, 40, 50, 60), image_size, [])
    assert above == (30, 30, 50, 40)
    under = _place_text(size, (30, 40, 50, 60), image_size, [above])
    assert under == (30, 60, 50, 70)
    inside = _place_text(size, (30, 40, 50, 60), image_size, [above, under])
    assert inside == (30, 40, 50, 50)
    assert _place_text(size, (30, 40, 50, 60), image_size, [above, under, inside]) is None
    assert _place_text(size, (95, 2, 99, 9), image_size, []) == (79, 9, 99, 19)  # no space above or to the right
