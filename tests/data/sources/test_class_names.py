"""Class names and file ids of common segmentation datasets."""

import pytest

from saccade.data.sources.class_names import (
    ADE20K,
    CITYSCAPES,
    CITYSCAPES_LABEL_IDS,
    COCO_IDS,
    COCO_MERGED,
    COCO_PANOPTIC_IDS,
    COCO_PANOPTIC_STUFF,
    COCO_STUFF,
    COCO_STUFF_IDS,
    COCO_THINGS,
    COCO_UNMERGED,
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


@pytest.mark.shows("VT-70")
def test_stuff_classes_merge_into_53_and_things():
    """Stuff classes are unchanged, merged once or unlabelled; ids 184 to 200 of the panoptic task are merged ones."""
    plain = """banner, blanket, bridge, cardboard, counter, curtain, door-stuff, floor-wood, flower, fruit, gravel,
        house, light, mirror-stuff, net, pillow, platform, playingfield, railroad, river, road, roof, sand, sea, shelf,
        snow, stairs, tent, towel, wall-brick, wall-stone, wall-tile, wall-wood, water-other,
        window-blind, window-other"""
    assert COCO_PANOPTIC_STUFF[1:37] == [name.strip() for name in plain.split(",")]  # panoptic ids 92 to 181
    members = [name for names in COCO_MERGED.values() for name in names]
    assert (len(COCO_MERGED), len(members), len(COCO_UNMERGED)) == (17, 43, 12)
    assert len(set(members) | set(COCO_UNMERGED)) == 55
    assert set(members) | set(COCO_UNMERGED) < set(COCO_STUFF)
    assert len(COCO_PANOPTIC_STUFF) == 54
    assert COCO_PANOPTIC_STUFF[:3] == ["things", "banner", "blanket"]
    assert COCO_PANOPTIC_STUFF[36:38] == ["window-other", "tree-merged"]
    assert COCO_PANOPTIC_STUFF[-1] == "rug-merged"
    assert len(COCO_PANOPTIC_IDS) == 80 + 91 - 12
    names = COCO_THINGS + COCO_STUFF
    for value, index in COCO_PANOPTIC_IDS.items():
        name, merged = names[COCO_IDS[value]], COCO_PANOPTIC_STUFF[index]
        assert name in {"things": COCO_THINGS, **COCO_MERGED}.get(merged, [merged])


def test_flipped_classes_exchange_left_and_right():
    flipped = flipped_classes(LIP)
    assert LIP[flipped[LIP.index("left-shoe")]] == "right-shoe"
    assert [flipped[i] for i in flipped] == list(range(20))
    assert flipped[:14] == list(range(14))
    assert flipped_classes(ADE20K) == list(range(150))
