"""A path -> datasets for each task. `find_*_splits` recognises what is at a path, `open_*` opens and checks it.

A finder returns {split name: opener}; a path without splits is one split named "all". Openers of images, videos and
objects take `classes`, the class names of another split or of a model, or None.
"""

from saccade.data.open.images import find_splits, find_video_splits, open_split, open_train_and_val
from saccade.data.open.masks import find_mask_splits, open_mask_split, open_train_and_val_masks
from saccade.data.open.objects import find_object_splits, open_object_split, open_train_and_val_objects
from saccade.data.open.splits import EMBEDDED_IMAGES, EMBEDDED_VIDEOS

__all__ = [
    "EMBEDDED_IMAGES",
    "EMBEDDED_VIDEOS",
    "find_mask_splits",
    "find_object_splits",
    "find_splits",
    "find_video_splits",
    "open_mask_split",
    "open_object_split",
    "open_split",
    "open_train_and_val",
    "open_train_and_val_masks",
    "open_train_and_val_objects",
]
