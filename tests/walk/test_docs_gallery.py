"""The scripts of docs/gallery run on embedded material and draw at least one figure."""

import runpy
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import pytest

from saccade.tokens import TOKENIZERS
from tests.walk.doc_pages import ROOT
from tests.weights.folder import SHIPPED, weights_in

SCRIPTS = sorted((ROOT / "docs/gallery").glob("*.py"))
NEEDS = {
    "02_features_in_other_libraries": ("segmentation_models_pytorch",),
    "05_export_and_onnxruntime": ("onnxruntime", "onnxscript"),
    "07_captum": ("captum",),
    "08_quantus": ("quantus",),
}


def test_gallery_has_the_promised_examples():
    names = " ".join(script.stem for script in SCRIPTS)
    words = "finetune features authors_checkpoint explain onnxruntime tokenizer captum quantus"
    for word in words.split():
        assert word in names


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_runs_and_draws(script, tmp_path, monkeypatch):
    for package in NEEDS.get(script.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("Agg")
    plt.close("all")
    with weights_in(SHIPPED), patch.dict(TOKENIZERS):
        runpy.run_path(str(script), run_name="__main__")
    figures = [plt.figure(number) for number in plt.get_fignums()]
    assert figures
    for figure in figures:
        figure.canvas.draw()
        assert np.asarray(figure.canvas.buffer_rgba()).std() > 5  # not blank
    plt.close("all")
