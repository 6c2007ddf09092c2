"""What strangers send is checked before it is decoded, and refused in words they can use."""

import numpy as np
import pytest
from PIL import Image

from saccade.data.synthetic.photos import photo_paths
from saccade.web.uploads import BadUpload, Limits, read_upload


def test_a_photograph_is_read():
    picture = read_upload(photo_paths()["cat"])
    assert picture.mode == "RGB"
    assert min(picture.size) > 200


def test_turned_transparent_and_deep_pictures_are_read(tmp_path):
    exif = Image.Exif()
    exif[274] = 6  # a camera held upright
    Image.new("RGB", (40, 20), "red").save(tmp_path / "turned.jpg", exif=exif)
    assert read_upload(tmp_path / "turned.jpg").size == (20, 40)
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_upload(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
    Image.fromarray(np.full((8, 8), 65535, np.uint16)).save(tmp_path / "deep.png")
    assert read_upload(tmp_path / "deep.png").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("notes.txt", b"dear diary", r"^notes\.txt is not a picture\. JPEG, PNG, WebP"),
        ("cat.jpg", b"not really", r"^cat\.jpg is not a picture"),
        ("page.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not a picture"),
        ("plot.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is not a picture"),
        ("empty.png", b"", r"^empty\.png is empty"),
    ],
)
def test_other_files_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadUpload, match=words) as told:
        read_upload(tmp_path / name)
    assert str(tmp_path) not in str(told.value)


def test_half_a_picture_is_named(tmp_path):
    whole = photo_paths()["cat"].read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(BadUpload, match=r"^cut\.jpg is damaged or incomplete\.$"):
        read_upload(tmp_path / "cut.jpg")


def test_limits_of_size_and_pixels(tmp_path):
    cat = photo_paths()["cat"]
    with pytest.raises(BadUpload, match=r"cat\.jpg has 0\.0 MB; the limit is 0\.01 MB"):
        read_upload(cat, Limits(megabytes=0.01))
    with pytest.raises(BadUpload, match=r"megapixels; the limit is 0\.01"):
        read_upload(cat, Limits(megapixels=0.01))
    Image.new("1", (30_000, 20_000)).save(tmp_path / "bomb.png")  # 600 megapixels in a few kilobytes
    assert (tmp_path / "bomb.png").stat().st_size < 200_000
    with pytest.raises(BadUpload, match=r"bomb\.png has far too many pixels"):
        read_upload(tmp_path / "bomb.png")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "large.png")
    with pytest.raises(BadUpload, match="has 100 megapixels; the limit is 40"):
        read_upload(tmp_path / "large.png")


def test_nothing_and_no_longer():
    with pytest.raises(BadUpload, match="no picture yet"):
        read_upload(None)
    with pytest.raises(BadUpload, match="send it again"):
        read_upload("/nowhere/cat.jpg")
