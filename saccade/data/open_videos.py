"""A path -> videos, split by split: class folders, lists of files, or the embedded motions."""

from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.open import HELD_OUT, TRAIN, Opener
from saccade.data.sources.base import DataError, Source
from saccade.data.sources.videos import VideoFolder, VideoList
from saccade.data.synthetic.motions import MOTIONS, MotionSet

EMBEDDED = "motions"
LISTS = (".csv", ".tsv", ".txt")


def find_video_splits(
    path: str | Path, motions: int = 4096, size: int = 64, frames: int = 8, **_: Any
) -> dict[str, Opener]:
    """What lies at `path`; a path without splits is one split named "all".

    `motions` (clips to train on), `size` and `frames` are for the embedded set.
    """
    if str(path) == EMBEDDED:
        held = max(len(MOTIONS), motions // 4)
        counts = {"train": motions, "val": held, "test": held}
        return {split: partial(_open_motions, count, size, frames, split) for split, count in counts.items()}
    path = Path(path)
    if not path.exists():
        raise DataError(f"no videos at {path}: expected class folders, a CSV list of files, or {EMBEDDED!r}.")
    if path.is_file():
        if path.suffix not in LISTS:
            raise DataError(f"{path}: expected a list of videos ({', '.join(LISTS)}) or a folder.")
        return {"all": partial(VideoList, path)}
    lists = {file.stem.lower(): file for suffix in LISTS for file in sorted(path.glob(f"*{suffix}"))}
    named = [name for name in TRAIN + HELD_OUT if name in lists]
    if named:
        return {name: partial(VideoList, lists[name]) for name in named}
    folders = [name for name in TRAIN + HELD_OUT if (path / name).is_dir()]
    if any(name in TRAIN for name in folders):
        return {name: partial(VideoFolder, path / name) for name in folders}
    return {"all": partial(VideoFolder, path)}


def _open_motions(count: int, size: int, frames: int, split: str, classes: list[str] | None = None) -> Source:
    return MotionSet(count, size, frames, split)
