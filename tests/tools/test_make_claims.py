"""docs/claims.md is generated from stored results of the declared runs, and from nothing else."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from saccade.reproduce.claim import load_claims
from saccade.reproduce.plan import run_of
from tests.reproduce.test_page import store

SCRIPT = Path(__file__).parents[2] / "tools/make_claims.py"
VALUES = {"CPE": [40.0, 41.0, 42.0], "none": [30.0, 31.0, 32.1]}


def load_tool():
    spec = spec_from_file_location("make_claims", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_seeds(folder: Path) -> None:
    """Add what the tool reads besides: the seed of each result."""
    claim = load_claims()["svit-cpe"]
    for changes in ((), ("epochs=1",)):
        for label in VALUES:
            for seed in range(3):
                file = folder / "results" / f"{run_of(claim, label, seed, changes).key}.json"
                if file.exists():
                    file.write_text(json.dumps(json.loads(file.read_text()) | {"run": {"seed": seed}}))


def test_page_is_current():
    tool = load_tool()
    assert tool.PAGE.read_text() == tool.generate()[0], "run python tools/make_claims.py"


def test_only_results_of_declared_recipes_are_added(tmp_path):
    tool, claim = load_tool(), load_claims()["svit-cpe"]
    store(tmp_path / "toy", claim, VALUES, changes=("epochs=1",))
    with_seeds(tmp_path / "toy")
    assert tool.add(tmp_path / "toy", tmp_path / "stored") == 0
    text, figure = tool.generate(tmp_path / "stored")
    assert "None of the 38 claims is measured yet" in text
    assert figure is None
    store(tmp_path / "real", claim, VALUES)
    with_seeds(tmp_path / "real")
    assert tool.add(tmp_path / "real", tmp_path / "stored") == 6
    text, figure = tool.generate(tmp_path / "stored")
    assert "**38 claims: 1 confirmed, 37 not measured.** Not measured: `vt-resnet`," in text
    assert "(figures/claims.png)" in text
    assert figure is not None
    assert figure.startswith(b"\x89PNG")
