"""The HTML report and the overview grid."""

import base64
import io
import re

import numpy as np
from PIL import Image

from saccade.data.synthetic.photos import photo_paths
from saccade.explain.drawing.figure import Panel
from saccade.explain.explanation import explain
from saccade.explain.overview import Column, overview
from saccade.reports.page import document, table


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
    assert explanation._repr_html_().startswith("<style>")
    assert "<main>" in explanation._repr_html_()


def test_report_escapes_names(tmp_path):
    path = tmp_path / "<img src=x onerror=alert(1)>.png"
    Image.new("RGB", (40, 40)).save(path)
    text = explain(path, "svit_nano", importance=()).html()
    assert "<img src=x" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;.png" in text
    assert "<title>&lt;b&gt;</title>" in document("<b>", "")


def test_table_aligns_numbers():
    html = table(("name", "value"), [("a", "1")], numeric=(1,))
    assert '<th>name</th><th class="number">value</th>' in html
    assert '<td>a</td><td class="number">1</td>' in html


def test_overview_has_a_row_per_image_and_a_column_per_model():
    image = np.zeros((4, 4, 3), np.uint8)
    columns = [Column(f"model {i}", "note", [Panel(image, "<a>"), Panel(image, "b")]) for i in range(2)]
    html = overview([Panel(image, "first"), Panel(image, "second")], columns)
    assert html.count("<figure") == 2 * 3
    assert html.count('<figure class="first"') == 2
    assert "--columns: 3" in html
    assert html.count("&lt;a&gt;") == 4  # alt text and caption of each model's panel
