"""Objects, subsets and COCO's format."""

import numpy as np
from pycocotools import mask as coco_mask

from saccade.data.sources.base import Subset, hold_out
from saccade.data.sources.objects import Objects, to_coco, trainable_objects
from saccade.data.synthetic.scenes import SceneObjects


def four_objects() -> Objects:
    """Valid, crowd, outside of a 10 x 8 px image, and with an empty mask."""
    boxes = np.array([[-2, 1, 4, 5], [0, 0, 4, 4], [12, 0, 15, 4], [2, 2, 6, 6]], np.float32)
    masks = np.ones((4, 8, 10), np.uint8)
    masks[3] = 0
    return Objects(boxes, np.arange(1, 5), masks, np.array([False, True, False, False]), np.arange(10, 14))


def test_select_applies_to_every_field():
    objects = four_objects().select(np.array([2, 0]))
    assert objects.boxes.tolist() == [[12, 0, 15, 4], [-2, 1, 4, 5]]
    assert objects.labels.tolist() == [3, 1]
    assert objects.ids.tolist() == [12, 10]
    assert objects.masks is not None
    assert objects.masks.shape == (2, 8, 10)
    assert four_objects()._replace(masks=None).select(np.array([0])).masks is None


def test_trainable_objects_are_clipped_and_exclude_crowds_and_empty_ones():
    objects = trainable_objects(four_objects(), (10, 8))
    assert objects.ids.tolist() == [10]
    assert objects.boxes.tolist() == [[0, 1, 4, 5]]
    assert trainable_objects(four_objects()._replace(masks=None), (10, 8)).ids.tolist() == [10, 13]


def test_subset_selects_images_and_their_ground_truth():
    source = SceneObjects(6, 32)
    subset = Subset(source, [4, 1])
    assert subset.image_ids.tolist() == [5, 2]
    assert subset.objects(0, (32, 32)).ids.tolist() == source.objects(4).ids.tolist()
    assert subset.read(1).tobytes() == source.read(1).tobytes()
    assert subset.name(0) == source.name(4)
    truth = subset.ground_truth()
    assert {entry["id"] for entry in truth["images"]} == {2, 5}
    assert len(truth["annotations"]) == sum(len(source.objects(i).labels) for i in (1, 4))


def test_held_out_objects_partition_the_source():
    train, val = hold_out(SceneObjects(10, 32), 0.3)
    assert len(val) == 3
    assert sorted([*train.indices, *val.indices]) == list(range(10))


def test_to_coco_keeps_boxes_masks_and_crowds():
    source = SceneObjects(8, 48)
    document = to_coco(source)
    assert document["categories"][3] == {"id": 4, "name": "star"}
    assert document["images"][2] == {"id": 3, "width": 48, "height": 48, "file_name": "3"}
    annotations = iter(document["annotations"])
    for index in range(8):
        objects = source.objects(index)
        assert objects.masks is not None
        for box, label, mask, crowd in zip(objects.boxes, objects.labels, objects.masks, objects.crowd, strict=True):
            annotation = next(annotations)
            assert annotation["image_id"] == index + 1
            assert annotation["category_id"] == label
            assert annotation["iscrowd"] == crowd
            assert annotation["bbox"] == [*box[:2], *(box[2:] - box[:2])]
            assert annotation["area"] == mask.sum()
            np.testing.assert_array_equal(coco_mask.decode(annotation["segmentation"]), mask)
    assert next(annotations, None) is None
    assert [annotation["id"] for annotation in document["annotations"]] == [
        i + 1 for i in range(len(document["annotations"]))
    ]
