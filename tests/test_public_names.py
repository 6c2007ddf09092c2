"""`saccade.train` and `saccade.count` as a user calls them."""

import doctest

import pytest

import saccade
from saccade.benchmark import cost
from saccade.engine import train


@pytest.mark.parametrize(("name", "function"), [("count", cost.count), ("train", train.train)])
def test_public_name_is_the_function_and_its_example_runs(name, function, tmp_path, monkeypatch):
    assert name in saccade.__all__
    assert getattr(saccade, name) is function
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(function.__doc__, {"saccade": saccade}, name, None, None)
    assert len(example.examples) >= 2
    assert doctest.DocTestRunner().run(example).failed == 0
