"""Video files -> frames, decoded one by one with PyAV, so that a long video never fills the memory.

`VideoFile` reads a file, `VideoFrames` wraps an array. Frames are addressed by their position in display order, which
is well defined at a variable frame rate too.
"""

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from saccade._extras import printable, require
from saccade.data.decode.image import BadImage
from saccade.data.decode.urls import is_url, open_file

VIDEO_SUFFIXES = {
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp", ".ts", ".gif",
}  # fmt: skip


# FFmpeg's playlists (HLS, concat, DASH) would read other files and addresses, whatever the name of the file.
DEMUXERS = (
    "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "mpeg", "mpegvideo", "mpegts", "asf", "flv", "gif", "ogg",
    "h264", "hevc", "m4v", "ivf", "dv", "nut", "mxf", "rm", "vob", "av1", "obu",
)  # fmt: skip
OPEN_OPTIONS = {"format_whitelist": ",".join(DEMUXERS), "protocol_whitelist": "file"}
MAX_PIXELS = 40_000_000  # per frame; 8K has 33 million
LARGE = 16_000_000  # pixels per frame
MAX_PIXELS_PER_BYTE = 2000  # of a file with large frames; one constant 8K frame has 1 kB (AV1) to 100 kB (H.264)


def is_video_file(path: Any) -> bool:
    """Whether a path or URL names a video; an animated GIF is read as an image where images are expected."""
    return isinstance(path, (str, os.PathLike)) and Path(path).suffix.lower() in VIDEO_SUFFIXES - {".gif"}


class BadVideo(BadImage):
    """A video that cannot be read. The message is `name: reason`."""


class Video(Protocol):
    """Frames that can be counted and read by index."""

    def __len__(self) -> int:
        """Number of frames, at least 1."""
        ...

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """RGB frames at `indices`, which ascend and may repeat."""
        ...


class VideoFrames:
    """A video in memory: (T, H, W, 3) uint8."""

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            yield Image.fromarray(self.pixels[index])


def middle_frame(sample: "Image.Image | Video") -> Image.Image:
    """The image itself, or the middle frame of a video."""
    return sample if isinstance(sample, Image.Image) else next(sample.frames([len(sample) // 2]))


class VideoFile:
    """A video in a file.

    The constructor reads packet timestamps without decoding. `frames` seeks to the key frame before the first index and
    decodes up to the last one; it holds one frame at a time.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = str(path) if is_url(path) else Path(path)
        with _open_stream(self.path) as (container, stream):
            timestamps = [packet.pts for packet in container.demux(stream) if packet.size]
            # Raw streams have no timestamps; then `frames` decodes from the start and counts.
            self.timestamps = sorted(timestamps) if None not in timestamps else None
            self.count = len(timestamps)
            rate = float(stream.average_rate or 25)
            base = float(stream.time_base or 1 / rate)
            first = self.timestamps[0] if self.timestamps else 0
            # (T,) seconds since the first frame
            self.times = (
                [base * (t - first) for t in self.timestamps]
                if self.timestamps
                else [index / rate for index in range(self.count)]
            )
        if not self.count:
            raise BadVideo(str(self.path), "the video has no frames")

    def __len__(self) -> int:
        return self.count

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        pending = [self.timestamps[index] if self.timestamps else index for index in indices]
        image = None
        # `frame.reformat` keeps a converter per thread, which a forked process waits for when it frees it (PyAV 19).
        converter = require("av.video.reformatter", "train").VideoReformatter()
        with _open_stream(self.path) as (container, stream):
            if self.timestamps and pending and pending[0] > self.timestamps[0]:
                container.seek(pending[0], stream=stream)  # to the key frame at or before it
            for index, frame in enumerate(container.decode(stream)):
                timestamp = frame.pts if self.timestamps else index
                # A frame lost to corruption is replaced by the next one that decodes.
                ready = bisect_left(pending, timestamp + 1) if timestamp is not None else 0
                if ready:
                    image = _to_image(frame, converter)
                    yield from [image] * ready
                    pending = pending[ready:]
                if not pending:
                    return
        if image is None:
            raise BadVideo(str(self.path), "none of the requested frames can be decoded")
        yield from [image] * len(pending)


class VideoFrame(NamedTuple):
    """One frame of a video file as an image; `decode` reads it."""

    video: VideoFile
    index: int

    @property
    def name(self) -> str:
        """File name with the time of the frame: "clip-2.00s.mp4"."""
        path = Path(printable(self.video.path))
        return f"{path.stem}-{self.video.times[self.index]:.2f}s{path.suffix}"

    def decode(self) -> Image.Image:
        return next(self.video.frames([self.index]))


def frames_every(path: str | os.PathLike, seconds: float) -> Iterator[tuple[float, Image.Image]]:
    """Time and image of a frame of a video file every `seconds`, from the first one on; one frame in memory."""
    video, indices = _every(path, seconds)
    yield from zip((video.times[index] for index in indices), video.frames(indices), strict=True)


def list_frames(path: str | os.PathLike, seconds: float) -> list[VideoFrame]:
    """The frames of `frames_every`, not decoded yet."""
    video, indices = _every(path, seconds)
    return [VideoFrame(video, index) for index in indices]


def _every(path: str | os.PathLike, seconds: float) -> tuple[VideoFile, list[int]]:
    if not seconds > 0:
        raise ValueError(f"expected a positive number of seconds between frames, got {seconds}.")
    video = VideoFile(path)
    indices, due = [], 0.0
    for index, time in enumerate(video.times):
        if time >= due - 1e-6:
            indices.append(index)
            due = (int(time / seconds + 1e-6) + 1) * seconds
    return video, indices


def _to_image(frame: Any, converter: Any) -> Image.Image:
    """RGB, rotated as the file's metadata says."""
    rgb = converter.reformat(frame, format="rgb24")
    plane: Any = rgb.planes[0]  # a buffer; `frame.to_image` copies it twice before Pillow does
    direction = 1 if plane.line_size > 0 else -1  # bottom-up frames
    image = Image.frombytes(
        "RGB", (rgb.width, rgb.height), memoryview(plane), "raw", "RGB", abs(plane.line_size), direction
    )
    degrees = getattr(frame, "rotation", 0) % 360  # counter-clockwise
    return image.rotate(degrees, expand=True) if degrees else image


@contextmanager
def _open_stream(path: Path | str) -> Iterator[tuple[Any, Any]]:
    """The container of a file or URL and its first video stream; FFmpeg's errors become `BadVideo`."""
    av = require("av", "train")
    if isinstance(path, Path) and not path.is_file():
        raise BadVideo(str(path), "no such file")
    try:
        opened: Any = nullcontext(str(path)) if isinstance(path, Path) else open_file(path)
        with opened as file, av.open(file, options=OPEN_OPTIONS) as container:
            if not container.streams.video:
                raise BadVideo(str(path), "the file has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise BadVideo(str(path), "the codec of the video stream is not known to FFmpeg")
            limit = _max_pixels(path)
            _check_frame_size(path, stream.width, stream.height, limit)
            stream.codec_context.options = {"max_pixels": str(limit)}  # frames can change their size
            # Threads that decode different frames have a few frames each.
            stream.thread_type = "AUTO" if stream.width * stream.height <= LARGE else "SLICE"
            yield container, stream
    except (av.error.FFmpegError, UnicodeDecodeError) as error:
        raise BadVideo(str(path), f"damaged, or not a video ({error.__class__.__name__}: {error})") from error


def _max_pixels(path: Path | str) -> int:
    """Pixels per frame that a file may have: a few kilobytes with large frames are a damaged header."""
    if isinstance(path, Path):
        return min(MAX_PIXELS, max(LARGE, MAX_PIXELS_PER_BYTE * path.stat().st_size))
    return MAX_PIXELS


def _check_frame_size(path: Path | str, width: int, height: int, limit: int) -> None:
    if width * height > limit:
        content = "" if limit == MAX_PIXELS else " in a file of this size"
        raise BadVideo(
            str(path),
            f"expected at most {limit / 1e6:.0f} megapixels per frame{content}, got {width} x {height}. "
            "Downscale it first",
        )


def write_video(path: str | os.PathLike, pixels: np.ndarray, fps: int = 8) -> None:
    """Write (T, H, W, 3) uint8 as H.264 in MP4. Odd sides are padded by repeating the last row or column."""
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
