"""Class names and file ids of common segmentation datasets."""

from saccade.data.sources.class_names import (
    ADE20K,
    CITYSCAPES,
    CITYSCAPES_LABEL_IDS,
    COCO_IDS,
    COCO_STUFF,
    COCO_STUFF_IDS,
    COCO_THINGS,
    LIP,
    flipped_classes,
)


def test_datasets_have_their_numbers_of_distinct_classes():
    counts = {len(names) for names in (ADE20K,)}, len(CITYSCAPES), len(LIP), len(COCO_THINGS), len(COCO_STUFF)
    assert counts == ({150}, 19, 20, 80, 91)
    for names in (ADE20K, CITYSCAPES, LIP, COCO_THINGS + COCO_STUFF):
        assert len(set(names)) == len(names)


def test_file_ids_map_to_the_right_classes():
    names = COCO_THINGS + COCO_STUFF
    assert sorted(COCO_IDS.values()) == list(range(171))
    assert names[COCO_IDS[0]] == "person"  # COCO id 1
    assert names[COCO_IDS[89]] == "toothbrush"  # COCO id 90
    assert names[COCO_IDS[181]] == "wood"  # COCO id 182
    assert sorted(COCO_STUFF_IDS.values()) == list(range(91))
    assert COCO_STUFF[COCO_STUFF_IDS[92]] == "banner"
    assert sorted(CITYSCAPES_LABEL_IDS.values()) == list(range(19))
    assert CITYSCAPES[CITYSCAPES_LABEL_IDS[26]] == "car"


def test_flipped_classes_exchange_left_and_right():
    flipped = flipped_classes(LIP)
    assert LIP[flipped[LIP.index("left-shoe")]] == "right-shoe"
    assert [flipped[i] for i in flipped] == list(range(20))
    assert flipped[:14] == list(range(14))
    assert flipped_classes(ADE20K) == list(range(150))
