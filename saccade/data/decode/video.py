"""Videos: their frames, read one by one where they are needed; never a whole film in memory.

`VideoFile` reads files with PyAV, `VideoFrames` holds frames that are there already; both know their length and give
any of their frames, in order. Frames are counted as they are shown, whatever the time between them, so a variable
frame rate needs no care.
"""

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from saccade._extras import require
from saccade.data.decode.image import BadImage

SUFFIXES = {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp", ".ts", ".gif"}


class BadVideo(BadImage):
    """A video that cannot be read; the message names the file and the reason."""

    def __reduce__(self):  # it travels from loader processes
        return BadVideo, (self.name, self.reason)


class Video(Protocol):
    """What can be shown frame by frame."""

    def __len__(self) -> int:
        """Number of frames, at least 1."""
        ...

    def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """The frames with these numbers (ascending, perhaps repeated), as RGB."""
        ...


class VideoFrames:
    """A video that is in memory already: (T, H, W, 3) uint8."""

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        for number in numbers:
            yield Image.fromarray(self.pixels[number])


def middle_frame(seen: "Image.Image | Video") -> Image.Image:
    """A picture that stands for what was read: itself, or the frame in the middle."""
    return seen if isinstance(seen, Image.Image) else next(seen.frames([len(seen) // 2]))


class VideoFile:
    """A video in a file. Opening reads the packets' times alone, without decoding; `frames` decodes from the last key
    frame before the first frame asked for to the last one, and keeps no frame longer than it is looked at.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        with _opened(self.path) as (container, stream):
            packets = [packet for packet in container.demux(stream) if packet.size]
            times = [packet.pts for packet in packets]
            # Some streams carry no times; then frames are counted while everything is decoded from the start.
            self.times = sorted(times) if None not in times else None
            self.count = len(packets)
        if not self.count:
            raise BadVideo(str(self.path), "it holds no frames")

    def __len__(self) -> int:
        return self.count

    def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        wanted = [self.times[number] if self.times else number for number in numbers]
        last = None
        with _opened(self.path) as (container, stream):
            if self.times and wanted and wanted[0] > self.times[0]:
                container.seek(wanted[0], stream=stream)  # to the key frame at or before it
            for number, frame in enumerate(container.decode(stream)):
                time = frame.pts if self.times else number
                # A frame lost to damage is stood in for by the next one.
                done = bisect_left(wanted, time + 1) if time is not None else 0
                if done:
                    last = _upright(frame)
                    yield from [last] * done
                    wanted = wanted[done:]
                if not wanted:
                    return
        if last is None:
            raise BadVideo(str(self.path), "none of the frames asked for can be decoded")
        yield from [last] * len(wanted)


def _upright(frame: Any) -> Image.Image:
    """RGB, turned as the file says it should be shown."""
    picture = frame.to_image()
    turn = getattr(frame, "rotation", 0) % 360  # anticlockwise
    return picture.rotate(turn, expand=True) if turn else picture


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; whatever FFmpeg has to say about a bad file becomes `BadVideo`."""
    av = require("av", "train")
    if not path.is_file():
        raise BadVideo(str(path), "no such file")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise BadVideo(str(path), "it has no picture, only sound or text")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except (av.error.FFmpegError, UnicodeDecodeError) as error:
        raise BadVideo(str(path), f"damaged or of an unknown kind ({error.__class__.__name__}: {error})") from error


def write_video(path: str | os.PathLike, pixels: np.ndarray, fps: int = 8) -> None:
    """(T, H, W, 3) uint8 as H.264 in MP4; sides are made even by a repeated last row or column."""
    av = require("av", "train")
    pixels = np.pad(pixels, ((0, 0), (0, pixels.shape[1] % 2), (0, pixels.shape[2] % 2), (0, 0)), mode="edge")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    with av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "18", "preset": "veryfast"})
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    os.replace(temporary, path)
