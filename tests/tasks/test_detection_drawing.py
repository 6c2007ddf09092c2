"""Detections on their picture."""

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


def test_boxes_and_masks_are_painted_where_they_are_and_nothing_else_changes():
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


def test_the_threshold_decides_what_is_drawn():
    assert draw_detections(GREY, PREDICTION, threshold=0.95).tobytes() == GREY.tobytes()
    low = np.asarray(draw_detections(GREY, PREDICTION, threshold=0.1, names=False))
    assert (low[0, 0] != 100).any()


def test_one_class_gets_a_colour_an_object_and_names_need_room():
    """Thirty-one names hide a small picture, but not a large one."""
    boxes = torch.tensor([[2.0 * i, 2.0 * i, 2.0 * i + 10, 2.0 * i + 10] for i in range(31)])
    many = {"boxes": boxes, "labels": torch.ones(31).long(), "scores": torch.full((31,), 0.9)}
    drawn = draw_detections(GREY, many, ["nucleus"])
    assert drawn.tobytes() == draw_detections(GREY, many, ["nucleus"], names=False).tobytes()
    assert drawn.getpixel((0, 0)) != drawn.getpixel((60, 60)) != (100, 100, 100)
    large = GREY.resize((1000, 800))
    drawn = draw_detections(large, many, ["nucleus"])
    assert drawn.tobytes() != draw_detections(large, many, ["nucleus"], names=False).tobytes()


def test_a_name_stands_above_its_box():
    with_name = np.asarray(draw_detections(GREY, PREDICTION, ["cat", "dog"], names=True))
    without = np.asarray(draw_detections(GREY, PREDICTION, ["cat", "dog"], names=False))
    rows = np.flatnonzero((with_name != without).any((1, 2)))
    assert rows.min() >= 0
    assert set(range(30, 40)) & set(rows.tolist())  # above the lower box


def test_the_description_is_sorted_and_named():
    found = describe_detections(PREDICTION, ["cat", "dog"])
    assert [(entry["name"], entry["index"]) for entry in found] == [("cat", 1), ("dog", 0), ("cat", 2)]
    assert found[0]["box"] == [50.0, 40.0, 90.0, 70.0]
    assert describe_detections(PREDICTION)[0]["name"] == "1"
    nothing = {key: value[:0] for key, value in PREDICTION.items()}
    assert describe_detections(nothing) == []
    assert draw_detections(GREY, nothing).tobytes() == GREY.tobytes()


def test_a_name_at_the_right_edge_is_moved_into_the_picture():
    """The same name, so the same number of pixels in its colour, wherever the box begins."""
    found = {"labels": torch.tensor([1]), "scores": torch.tensor([0.9])}
    inked = []
    for x in (40.0, 180.0):
        drawn = draw_detections(
            Image.new("RGB", (200, 100)),
            found | {"boxes": torch.tensor([[x, 50, x + 15, 65]])},
            ["nucleus"],
            names=True,
        )
        inked.append((np.asarray(drawn)[:50] != 0).any(2).sum())
    assert inked[0] == inked[1] > 300


def test_no_name_is_written_over_a_surer_one():
    from saccade.tasks.detection_drawing import _place_text

    size, picture = (20, 10), (100, 100)
    above = _place_text(size, (30, 40, 50, 60), picture, [])
    assert above == (30, 30, 50, 40)
    under = _place_text(size, (30, 40, 50, 60), picture, [above])
    assert under == (30, 60, 50, 70)
    inside = _place_text(size, (30, 40, 50, 60), picture, [above, under])
    assert inside == (30, 40, 50, 50)
    assert _place_text(size, (30, 40, 50, 60), picture, [above, under, inside]) is None
    assert _place_text(size, (95, 2, 99, 9), picture, []) == (79, 9, 99, 19)  # no room above, none to the right
