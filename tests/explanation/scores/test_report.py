"""Score files."""

import json
import re

import numpy as np
from PIL import Image

from saccade.explanation.scores.ground_truth import Sample
from saccade.explanation.scores.score import score
from tests.explanation.models import QuadrantModel


def test_scores_are_saved_as_page_chart_and_json(folders, tmp_path):
    scores = score(folders, QuadrantModel(), size=64, limit=1, out=tmp_path / "out")
    text = (tmp_path / "out" / "scores.html").read_text()
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == scores.summary()
    assert Image.open(tmp_path / "out" / "scores.png").format == "PNG"
    assert text.count("<svg") == 1
    assert "fill: var(--line-0)" in text
    assert "#010203" not in text
    assert "Tokens as superpixels" in text
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert "<metadata" not in text  # no date: the same scores give the same file


def test_chart_without_ground_truth_shows_redundancy(tmp_path):
    class NoClasses(QuadrantModel):
        def forward(self, images):
            return self.group(images)[0]

    sample = Sample("a", Image.fromarray(np.zeros((64, 64, 3), np.uint8)), None, None)
    scores = score([sample], NoClasses(), size=64, out=tmp_path)
    assert scores.superpixels == scores.pointing == []
    assert scores.curves == {}
    text = (tmp_path / "scores.html").read_text()
    assert "redundancy" in text
    assert "Deletion and insertion" not in text
