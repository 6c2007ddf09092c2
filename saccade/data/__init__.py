"""Pixels in: files to batches of images, masks, boxes and clips."""

from typing import TYPE_CHECKING

from saccade._extras import lazy_imports

if TYPE_CHECKING:
    from saccade.data.decode.files import list_files
    from saccade.data.decode.image import DECODE_ERRORS, BadImage, read_image
    from saccade.data.decode.inputs import list_inputs, read_input
    from saccade.data.decode.urls import is_url
    from saccade.data.decode.video import VIDEO_SUFFIXES, VideoFile, VideoFrame, frames_every, middle_frame
    from saccade.data.loader import FileLoader, Order
    from saccade.data.open import (
        find_mask_splits,
        find_object_splits,
        find_splits,
        find_video_splits,
        open_split,
        open_train_and_val,
    )
    from saccade.data.open.inputs import Inputs
    from saccade.data.synthetic.motions import MOTIONS, MotionSet
    from saccade.data.synthetic.photos import photo_paths
    from saccade.data.synthetic.scenes import Scenes
    from saccade.data.transforms.batch import normalize
    from saccade.data.transforms.image import eval_transform, train_transform

__all__ = [
    "DECODE_ERRORS",
    "MOTIONS",
    "VIDEO_SUFFIXES",
    "BadImage",
    "FileLoader",
    "Inputs",
    "MotionSet",
    "Order",
    "Scenes",
    "VideoFile",
    "VideoFrame",
    "eval_transform",
    "find_mask_splits",
    "find_object_splits",
    "find_splits",
    "find_video_splits",
    "frames_every",
    "is_url",
    "list_files",
    "list_inputs",
    "middle_frame",
    "normalize",
    "open_split",
    "open_train_and_val",
    "photo_paths",
    "read_image",
    "read_input",
    "train_transform",
]

__getattr__ = lazy_imports(__name__)
