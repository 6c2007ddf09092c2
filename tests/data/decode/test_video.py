"""Real containers in, the right frames out; a damaged file is one clear error."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

from saccade.data.decode.video import BadVideo, VideoFile, VideoFrames, write_video
from tests.peak_memory import PEAK

av = pytest.importorskip("av")


def greys(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Frame i is grey 4 i + 8 all over."""
    return np.stack([np.full((height, width, 3), 4 * i + 8, np.uint8) for i in range(count)])


def numbers_of(frames) -> list[int]:
    return [round((np.array(frame).mean() - 8) / 4) for frame in frames]


def encode(path, pixels, codec="libx264", times=None, **options) -> None:
    """Any container and codec, with the times of the frames in milliseconds."""
    with av.open(str(path), "w", **options) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        stream.bit_rate = 2_000_000  # MPEG-4 needs it to keep greys apart
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i, frame in enumerate(pixels):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times:
                picture.pts, picture.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def test_any_frames_of_an_mp4(tmp_path):
    write_video(tmp_path / "a.mp4", greys(60), fps=25)
    video = VideoFile(tmp_path / "a.mp4")
    assert len(video) == 60
    for wanted in ([0], [59], [0, 0, 7, 31, 59, 59], list(range(40, 48))):
        assert numbers_of(video.frames(wanted)) == wanted


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.avi", "mpeg4", {}),
        ("a.mkv", "libx264", {}),
        ("a.ts", "libx264", {}),
        ("a.h264", "libx264", {"format": "h264"}),  # a bare stream: frames without times
    ],
)
def test_other_containers(tmp_path, name, codec, options):
    encode(tmp_path / name, greys(30), codec, **options)
    video = VideoFile(tmp_path / name)
    assert len(video) == 30
    assert numbers_of(video.frames([0, 11, 29])) == [0, 11, 29]


def test_frames_are_counted_whatever_the_time_between_them(tmp_path):
    times = np.cumsum(np.random.default_rng(0).integers(10, 200, 40)).tolist()
    encode(tmp_path / "variable.mkv", greys(40), times=times)
    video = VideoFile(tmp_path / "variable.mkv")
    assert len(video) == 40
    assert numbers_of(video.frames([3, 17, 38])) == [3, 17, 38]


def test_odd_sizes(tmp_path):
    encode(tmp_path / "odd.avi", greys(5, 47, 65), "mpeg4")
    assert next(VideoFile(tmp_path / "odd.avi").frames([2])).size == (65, 47)
    write_video(tmp_path / "odd.mp4", greys(5, 47, 65))
    assert next(VideoFile(tmp_path / "odd.mp4").frames([2])).size == (66, 48)


def test_one_frame_is_a_video(tmp_path):
    write_video(tmp_path / "one.mp4", greys(1))
    video = VideoFile(tmp_path / "one.mp4")
    assert len(video) == 1
    assert numbers_of(video.frames([0, 0, 0])) == [0, 0, 0]


def test_frames_in_memory():
    assert numbers_of(VideoFrames(greys(9)).frames([1, 1, 8])) == [1, 1, 8]


def bad_files(folder) -> dict[str, str]:
    write_video(folder / "good.mp4", greys(30))
    whole = (folder / "good.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("not a video at all")
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
        "sound.mp4": "only sound",
        "none.avi": "holds no frames|damaged",
        "missing.mp4": "no such file",
    }


def test_a_bad_file_is_one_clear_error(tmp_path):
    for name, reason in bad_files(tmp_path).items():
        with pytest.raises(BadVideo, match=rf"{name}: .*({reason})"):
            VideoFile(tmp_path / name)


def test_damage_inside_is_found_when_it_is_reached(tmp_path):
    noise = np.random.default_rng(0).integers(256, size=(40, 48, 64, 3)).astype(np.uint8)
    write_video(tmp_path / "hurt.mp4", noise)
    content = bytearray((tmp_path / "hurt.mp4").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = np.random.default_rng(1).bytes(4000)
    (tmp_path / "hurt.mp4").write_bytes(content)
    video = VideoFile(tmp_path / "hurt.mp4")
    with pytest.raises(BadVideo, match="damaged"):
        list(video.frames(range(40)))


def test_the_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(BadVideo("a.mp4", "it holds no frames")))
    assert (str(error), error.name) == ("a.mp4: it holds no frames", "a.mp4")


def test_frames_are_made_one_by_one_as_they_are_asked_for(tmp_path, monkeypatch):
    from saccade.data.decode import video as module

    made: list[int] = []
    upright = module._upright
    monkeypatch.setattr(module, "_upright", lambda frame: made.append(1) or upright(frame))
    write_video(tmp_path / "a.mp4", greys(60))
    frames = VideoFile(tmp_path / "a.mp4").frames(range(20, 60, 2))
    assert numbers_of([next(frames), next(frames), next(frames)]) == [20, 22, 24]
    assert len(made) == 3
    frames.close()


@pytest.mark.slow
def test_ten_minutes_are_read_in_bounded_memory(tmp_path):
    """12 clips of 32 frames from 9000 frames of 640x360: all frames at once would be 6 GB."""
    import subprocess
    import sys

    with av.open(str(tmp_path / "long.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=15, options={"preset": "ultrafast", "g": "150"})
        stream.height, stream.width, stream.pix_fmt = 360, 640, "yuv420p"
        for i in range(9000):
            picture = av.VideoFrame.from_ndarray(np.full((360, 640, 3), i % 250, np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
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
