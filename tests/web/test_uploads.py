"""Uploads are checked before they are decoded; errors name the file, not its path."""

import numpy as np
import pytest
from PIL import Image

from saccade.data.synthetic.photos import photo_paths
from saccade.web.uploads import BadUpload, Limits, read_upload


def test_photograph_is_read_as_rgb():
    image = read_upload(photo_paths()["cat"])
    assert image.mode == "RGB"
    assert min(image.size) > 200


def test_exif_orientation_alpha_and_16_bit_are_handled(tmp_path):
    exif = Image.Exif()
    exif[274] = 6  # rotated by 90 degrees
    Image.new("RGB", (40, 20), "red").save(tmp_path / "rotated.jpg", exif=exif)
    assert read_upload(tmp_path / "rotated.jpg").size == (20, 40)
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "transparent.png")
    assert read_upload(tmp_path / "transparent.png").getpixel((0, 0)) == (255, 255, 255)
    Image.fromarray(np.full((8, 8), 65535, np.uint16)).save(tmp_path / "16bit.png")
    assert read_upload(tmp_path / "16bit.png").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("notes.txt", b"dear diary", r"^notes\.txt is not an image\. Supported: JPEG, PNG, WebP"),
        ("cat.jpg", b"not really", r"^cat\.jpg is not an image"),
        ("page.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image"),
        ("plot.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is not an image"),
        ("empty.png", b"", r"^empty\.png is empty"),
    ],
)
def test_other_files_are_rejected(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadUpload, match=message) as caught:
        read_upload(tmp_path / name)
    assert str(tmp_path) not in str(caught.value)


def test_truncated_image_is_rejected(tmp_path):
    content = photo_paths()["cat"].read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 3])
    with pytest.raises(BadUpload, match=r"^cut\.jpg is damaged or incomplete\.$"):
        read_upload(tmp_path / "cut.jpg")


def test_file_size_and_pixels_are_limited(tmp_path):
    cat = photo_paths()["cat"]
    with pytest.raises(BadUpload, match=r"cat\.jpg has 0\.0 MB; the limit is 0\.01 MB"):
        read_upload(cat, Limits(megabytes=0.01))
    with pytest.raises(BadUpload, match=r"megapixels; the limit is 0\.01"):
        read_upload(cat, Limits(megapixels=0.01))
    Image.new("1", (30_000, 20_000)).save(tmp_path / "bomb.png")  # 600 megapixels in a few kilobytes
    assert (tmp_path / "bomb.png").stat().st_size < 200_000
    with pytest.raises(BadUpload, match=r"bomb\.png has too many pixels"):
        read_upload(tmp_path / "bomb.png")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "large.png")
    with pytest.raises(BadUpload, match="has 100 megapixels; the limit is 40"):
        read_upload(tmp_path / "large.png")


def test_missing_and_expired_uploads_are_rejected():
    with pytest.raises(BadUpload, match="No file yet"):
        read_upload(None)
    with pytest.raises(BadUpload, match="upload it again"):
        read_upload("/nowhere/cat.jpg")
