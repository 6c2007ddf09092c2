"""The HTML report."""

import base64
import io
import re

from PIL import Image

from saccade.data.synthetic.photos import photo_paths
from saccade.explanation.explain import explain


def test_report_is_self_contained(cat, tmp_path):
    explanation = explain([cat, photo_paths()["clock"]], "svit_nano", out=tmp_path, importance=())
    text = (tmp_path / "report.html").read_text()
    assert text == explanation.html()
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    assert "The weights are randomly initialised" in text
    assert 'href="#image-1"' in text
    images = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', text)
    assert len(images) == 2 + sum(len(f.panels) for image in explanation.images for f in image.figures.values())
    for kind, data in images[:5]:
        assert Image.open(io.BytesIO(base64.b64decode(data))).format == kind.upper()
    assert explanation._repr_html_().lstrip().startswith("<style>")
    assert "<main>" in explanation._repr_html_()


def test_report_escapes_names(tmp_path):
    path = tmp_path / "<img src=x onerror=alert(1)>.png"
    Image.new("RGB", (40, 40)).save(path)
    text = explain(path, "svit_nano", importance=()).html()
    assert "<img src=x" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;.png" in text
