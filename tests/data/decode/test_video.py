"""Frame-accurate reading of video containers, and errors for damaged files."""

import multiprocessing
import os
import pickle
from fractions import Fraction
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest

from saccade.data.decode import video
from saccade.data.decode.video import BadVideo, VideoFile, VideoFrames, frames_every, write_video
from tests.peak_memory import PEAK

av = pytest.importorskip("av")


def greys(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Frame i has the constant grey value 4 i + 8."""
    return np.stack([np.full((height, width, 3), 4 * i + 8, np.uint8) for i in range(count)])


def frame_indices(frames) -> list[int]:
    return [round((np.array(frame).mean() - 8) / 4) for frame in frames]


def encode(path, pixels, codec="libx264", times=None, **options) -> None:
    """Write any container and codec; `times` are timestamps in milliseconds."""
    with av.open(str(path), "w", **options) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        stream.bit_rate = 2_000_000  # MPEG-4 needs it to keep greys apart
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i, frame in enumerate(pixels):
            image = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times:
                image.pts, image.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(image))
        container.mux(stream.encode())


def test_mp4_frames_are_read_by_index(tmp_path):
    write_video(tmp_path / "a.mp4", greys(60), fps=25)
    video = VideoFile(tmp_path / "a.mp4")
    assert len(video) == 60
    for indices in ([0], [59], [0, 0, 7, 31, 59, 59], list(range(40, 48))):
        assert frame_indices(video.frames(indices)) == indices


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.avi", "mpeg4", {}),
        ("a.mkv", "libx264", {}),
        ("a.ts", "libx264", {}),
        ("a.h264", "libx264", {"format": "h264"}),  # raw stream without timestamps
    ],
)
def test_frames_are_read_by_index_in_other_containers(tmp_path, name, codec, options):
    encode(tmp_path / name, greys(30), codec, **options)
    video = VideoFile(tmp_path / name)
    assert len(video) == 30
    assert frame_indices(video.frames([0, 11, 29])) == [0, 11, 29]


def test_frame_index_ignores_variable_frame_rate(tmp_path):
    times = np.cumsum(np.random.default_rng(0).integers(10, 200, 40)).tolist()
    encode(tmp_path / "variable.mkv", greys(40), times=times)
    video = VideoFile(tmp_path / "variable.mkv")
    assert len(video) == 40
    assert frame_indices(video.frames([3, 17, 38])) == [3, 17, 38]


def test_odd_sizes_are_read_exactly_and_written_padded(tmp_path):
    encode(tmp_path / "odd.avi", greys(5, 47, 65), "mpeg4")
    assert next(VideoFile(tmp_path / "odd.avi").frames([2])).size == (65, 47)
    write_video(tmp_path / "odd.mp4", greys(5, 47, 65))
    assert next(VideoFile(tmp_path / "odd.mp4").frames([2])).size == (66, 48)


def test_single_frame_video_repeats_its_frame(tmp_path):
    write_video(tmp_path / "one.mp4", greys(1))
    video = VideoFile(tmp_path / "one.mp4")
    assert len(video) == 1
    assert frame_indices(video.frames([0, 0, 0])) == [0, 0, 0]


def test_video_frames_are_read_by_index():
    assert frame_indices(VideoFrames(greys(9)).frames([1, 1, 8])) == [1, 1, 8]


def bad_files(folder) -> dict[str, str]:
    write_video(folder / "good.mp4", greys(30))
    content = (folder / "good.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(content[: len(content) // 2])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("not a video")
    with av.open(str(folder / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 16000
        container.mux(stream.encode(silence))
        container.mux(stream.encode())
    with av.open(str(folder / "none.avi"), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        container.start_encoding()
    return {
        "cut.mp4": "damaged",
        "empty.mp4": "damaged",
        "text.mp4": "damaged",
        "sound.mp4": "no video stream",
        "none.avi": "has no frames|damaged",
        "missing.mp4": "no such file",
    }


def test_bad_file_raises_with_name_and_reason(tmp_path):
    for name, reason in bad_files(tmp_path).items():
        with pytest.raises(BadVideo, match=rf"{name}: .*({reason})"):
            VideoFile(tmp_path / name)


def test_corrupt_frame_raises_while_decoding(tmp_path):
    noise = np.random.default_rng(0).integers(256, size=(40, 48, 64, 3)).astype(np.uint8)
    write_video(tmp_path / "corrupt.mp4", noise)
    content = bytearray((tmp_path / "corrupt.mp4").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = np.random.default_rng(1).bytes(4000)
    (tmp_path / "corrupt.mp4").write_bytes(content)
    video = VideoFile(tmp_path / "corrupt.mp4")
    with pytest.raises(BadVideo, match="damaged"):
        list(video.frames(range(40)))


def test_bad_video_survives_pickling():
    error = pickle.loads(pickle.dumps(BadVideo("a.mp4", "the video has no frames")))
    assert type(error) is BadVideo
    assert (str(error), error.name) == ("a.mp4: the video has no frames", "a.mp4")


def test_frames_are_decoded_lazily(tmp_path, monkeypatch):
    from saccade.data.decode import video as module

    converted: list[int] = []
    to_image = module._to_image
    monkeypatch.setattr(module, "_to_image", lambda *values: converted.append(1) or to_image(*values))
    write_video(tmp_path / "a.mp4", greys(60))
    frames = VideoFile(tmp_path / "a.mp4").frames(range(20, 60, 2))
    assert frame_indices([next(frames), next(frames), next(frames)]) == [20, 22, 24]
    assert len(converted) == 3
    frames.close()


@pytest.mark.slow
def test_ten_minute_video_is_read_in_bounded_memory(tmp_path):
    """12 clips of 32 frames from 9000 frames of 640x360: decoded, all frames would take 6 GB."""
    import subprocess
    import sys

    with av.open(str(tmp_path / "long.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=15, options={"preset": "ultrafast", "g": "150"})
        stream.height, stream.width, stream.pix_fmt = 360, 640, "yuv420p"
        for i in range(9000):
            image = av.VideoFrame.from_ndarray(np.full((360, 640, 3), i % 250, np.uint8), format="rgb24")
            container.mux(stream.encode(image))
        container.mux(stream.encode())
    code = PEAK + (
        "import sys\n"
        "from saccade.data.decode.video import VideoFile\n"
        "import av, numpy, PIL.Image\n"
        "before = peak()\n"
        "video = VideoFile(sys.argv[1])\n"
        "for start in range(0, 8872, 2900):\n"
        "    for frame in video.frames(range(start, start + 128, 4)): frame.getpixel((0, 0))\n"
        "print(len(video), peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "long.mp4")], capture_output=True, text=True, check=True
    )
    count, kilobytes = map(int, done.stdout.split())
    assert count == 9000
    assert kilobytes < 100 * 1024


def test_frames_every_second_have_their_times(tmp_path):
    encode(tmp_path / "a.mp4", greys(50))  # 25 per second
    sampled = list(frames_every(tmp_path / "a.mp4", 0.4))
    assert [time for time, _ in sampled] == pytest.approx([0, 0.4, 0.8, 1.2, 1.6])
    assert frame_indices(image for _, image in sampled) == [0, 10, 20, 30, 40]
    assert len(list(frames_every(tmp_path / "a.mp4", 1e-4))) == 50
    assert len(list(frames_every(tmp_path / "a.mp4", 60))) == 1
    with pytest.raises(ValueError, match="expected a positive number of seconds between frames, got 0"):
        next(frames_every(tmp_path / "a.mp4", 0))


def test_frames_every_follows_a_variable_rate(tmp_path):
    encode(tmp_path / "a.mkv", greys(5), times=[100, 200, 1100, 1200, 2150])
    times, images = zip(*frames_every(tmp_path / "a.mkv", 1.0), strict=True)
    assert times == pytest.approx([0, 1.0, 2.05], abs=1e-3)
    assert frame_indices(images) == [0, 2, 4]


def test_frames_are_those_of_pyav(tmp_path):
    """Also of frames whose rows are padded: 3 x 18 bytes are not a multiple of 32."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 14, 18, 3), np.uint8)
    write_video(tmp_path / "a.mp4", pixels)
    with av.open(str(tmp_path / "a.mp4")) as container:
        expected = [np.array(frame.to_image()) for frame in container.decode(video=0)]
    frames = [np.array(frame) for frame in VideoFile(tmp_path / "a.mp4").frames([0, 1, 2])]
    np.testing.assert_array_equal(frames, expected)


def test_frame_with_rows_from_bottom_to_top_is_upright():
    class Plane(bytes):
        line_size = -8  # two pixels and padding

    rows = [bytes([1, 2, 3, 4, 5, 6, 0, 0]), bytes([7, 8, 9, 10, 11, 12, 0, 0])]
    rgb = SimpleNamespace(planes=[Plane(b"".join(reversed(rows)))], width=2, height=2)
    image = video._to_image(SimpleNamespace(), SimpleNamespace(reformat=lambda frame, format: rgb))
    np.testing.assert_array_equal(np.array(image).reshape(2, 6), [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])


def test_large_frames_in_a_small_file_are_refused(tmp_path, monkeypatch):
    write_video(tmp_path / "a.mp4", np.zeros((2, 64, 64, 3), np.uint8))
    size = (tmp_path / "a.mp4").stat().st_size
    assert size < 64 * 64
    monkeypatch.setattr(video, "LARGE", 1000)
    assert len(VideoFile(tmp_path / "a.mp4")) == 2
    monkeypatch.setattr(video, "MAX_PIXELS_PER_BYTE", 1)
    with pytest.raises(BadVideo, match=r"megapixels per frame in a file of this size, got 64 x 64"):
        VideoFile(tmp_path / "a.mp4")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_process_can_fork_while_a_thread_has_read_a_video(tmp_path):
    """Workers of data loaders are forked; a converter that PyAV keeps for the thread would block them."""
    write_video(tmp_path / "clip.mp4", greys(4))
    read, done = Event(), Event()

    def work():
        list(VideoFile(tmp_path / "clip.mp4").frames([0, 1]))
        read.set()
        done.wait()

    thread = Thread(target=work)
    thread.start()
    read.wait()
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join(30)
    process.kill()
    done.set()
    thread.join()
    assert process.exitcode == 0
