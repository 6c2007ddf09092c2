"""Class names of common segmentation datasets, and the ids that their files use."""

from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights


def _names(text: str) -> list[str]:
    return [name.strip() for name in " ".join(text.split()).split(",")]


ADE20K = _names(
    """wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person, earth, door,
    table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, mirror, rug, field, armchair,
    seat, fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, box, column, signboard, chest of drawers,
    counter, sand, sink, skyscraper, fireplace, refrigerator, grandstand, path, stairs, runway, case, pool table,
    pillow, screen door, stairway, river, bridge, bookcase, blind, coffee table, toilet, flower, book, hill, bench,
    countertop, stove, palm, kitchen island, computer, swivel chair, boat, bar, arcade machine, hovel, bus, towel,
    light, truck, tower, chandelier, awning, streetlight, booth, television receiver, airplane, dirt track, apparel,
    pole, land, bannister, escalator, ottoman, bottle, buffet, poster, stage, van, ship, fountain, conveyer belt,
    canopy, washer, plaything, swimming pool, stool, barrel, basket, waterfall, tent, bag, minibike, cradle, oven,
    ball, food, step, tank, trade name, microwave, pot, animal, bicycle, lake, dishwasher, screen, blanket, sculpture,
    hood, sconce, vase, traffic light, tray, ashcan, fan, pier, crt screen, plate, monitor, bulletin board, shower,
    radiator, glass, clock, flag"""
)

CITYSCAPES = _names(
    """road, sidewalk, building, wall, fence, pole, traffic light, traffic sign, vegetation, terrain, sky, person,
    rider, car, truck, bus, train, motorcycle, bicycle"""
)
_CITYSCAPES_TRAIN_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
CITYSCAPES_LABEL_IDS = {label_id: i for i, label_id in enumerate(_CITYSCAPES_TRAIN_IDS)}  # *_labelIds.png -> class

LIP = _names(
    """background, hat, hair, glove, sunglasses, upper-clothes, dress, coat, socks, pants, jumpsuits, scarf, skirt,
    face, left-arm, right-arm, left-leg, right-leg, left-shoe, right-shoe"""
)

# By COCO's id, 0 for the background; ids without annotations are "N/A".
_COCO_CATEGORIES = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
_THING_IDS = [i for i, name in enumerate(_COCO_CATEGORIES) if name not in ("__background__", "N/A")]
COCO_THINGS: list[str] = [_COCO_CATEGORIES[i] for i in _THING_IDS]
COCO_STUFF = _names(
    """banner, blanket, branch, bridge, building-other, bush, cabinet, cage, cardboard, carpet, ceiling-other,
    ceiling-tile, cloth, clothes, clouds, counter, cupboard, curtain, desk-stuff, dirt, door-stuff, fence, floor-marble,
    floor-other, floor-stone, floor-tile, floor-wood, flower, fog, food-other, fruit, furniture-other, grass, gravel,
    ground-other, hill, house, leaves, light, mat, metal, mirror-stuff, moss, mountain, mud, napkin, net, paper,
    pavement, pillow, plant-other, plastic, platform, playingfield, railing, railroad, river, road, rock, roof, rug,
    salad, sand, sea, shelf, sky-other, skyscraper, snow, solid-other, stairs, stone, straw, structural-other, table,
    tent, textile-other, towel, tree, vegetable, wall-brick, wall-concrete, wall-other, wall-panel, wall-stone,
    wall-tile, wall-wood, water-other, waterdrops, window-blind, window-other, wood"""
)
# stuffthingmaps store id - 1 (171 classes); stuff_*_pixelmaps store the id (91 classes, things are unlabelled).
COCO_IDS = {coco_id - 1: i for i, coco_id in enumerate([*_THING_IDS, *range(92, 183)])}
COCO_STUFF_IDS = {coco_id: i for i, coco_id in enumerate(range(92, 183))}

# COCO's panoptic task merges 43 of the 91 stuff classes into 17, keeps 36 and leaves 12 unlabelled. Panoptic FPN, the
# baseline of VT-FPN, segments these 53 and one class for all things.
# Names and order are those of COCO's panoptic categories; members of
# merged classes were not compared with COCO's file.
COCO_MERGED = {
    "tree-merged": _names("branch, tree, bush, leaves"),
    "fence-merged": _names("cage, fence, railing"),
    "ceiling-merged": _names("ceiling-tile, ceiling-other"),
    "sky-other-merged": _names("clouds, sky-other, fog"),
    "cabinet-merged": _names("cupboard, cabinet"),
    "table-merged": _names("desk-stuff, table"),
    "floor-other-merged": _names("floor-marble, floor-other, floor-tile"),
    "pavement-merged": _names("floor-stone, pavement"),
    "mountain-merged": _names("hill, mountain"),
    "grass-merged": _names("moss, grass, straw"),
    "dirt-merged": _names("mud, dirt"),
    "paper-merged": _names("napkin, paper"),
    "food-other-merged": _names("salad, vegetable, food-other"),
    "building-other-merged": _names("skyscraper, building-other"),
    "rock-merged": _names("stone, rock"),
    "wall-other-merged": _names("wall-concrete, wall-other, wall-panel"),
    "rug-merged": _names("mat, rug, carpet"),
}
COCO_UNMERGED = _names(
    """cloth, clothes, furniture-other, ground-other, metal, plant-other, plastic, solid-other, structural-other,
    textile-other, waterdrops, wood"""
)  # unlabelled in the panoptic task
_MERGED_NAME = {name: merged for merged, names in COCO_MERGED.items() for name in names}
_PLAIN = [name for name in COCO_STUFF if name not in _MERGED_NAME and name not in COCO_UNMERGED]
COCO_PANOPTIC_STUFF = ["things", *_PLAIN, *COCO_MERGED]  # in the order of the panoptic ids
# From the values of stuffthingmaps to these 54 classes.
COCO_PANOPTIC_IDS = dict.fromkeys((coco_id - 1 for coco_id in _THING_IDS), 0) | {
    91 + i: COCO_PANOPTIC_STUFF.index(_MERGED_NAME.get(name, name))
    for i, name in enumerate(COCO_STUFF)
    if name not in COCO_UNMERGED
}


def flipped_classes(classes: list[str]) -> list[int]:
    """For each class, its index after a horizontal flip: "left-arm" becomes "right-arm", others stay."""
    index = {name: i for i, name in enumerate(classes)}

    def counterpart(name: str) -> str:
        side, dash, part = name.partition("-")
        return {"left": "right", "right": "left"}.get(side, side) + dash + part

    return [index.get(counterpart(name), i) for name, i in index.items()]
