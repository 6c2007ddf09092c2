"""The example in the docstring of every public function runs."""

import doctest

import pytest
import torch

import saccade
from tests.weights.folder import SHIPPED, weights_in

NEEDS_DOWNLOADS = {"bootstrap", "convert_official"}  # a ViT of the Hub, an authors' file
TRAINS = {"count", "train"}  # tests/test_public_names.py
FUNCTIONS = sorted(name for name in saccade.__all__ if name.islower() and name not in NEEDS_DOWNLOADS | TRAINS)


def test_functions_are_listed():
    assert {"create_model", "evaluate", "explain", "load", "optimize", "predict", "record"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"saccade": saccade, "torch": torch}
    example = doctest.DocTestParser().get_doctest(getattr(saccade, name).__doc__ or "", names, name, None, None)
    assert example.examples, f"saccade.{name} has no example."
    printed: list[str] = []
    with weights_in(SHIPPED):
        doctest.DocTestRunner().run(example, out=printed.append)
    assert not printed, "".join(printed)
