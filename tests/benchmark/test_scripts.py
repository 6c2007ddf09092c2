"""benchmarks/README.md lists the scripts of benchmarks/."""

import argparse
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_readme_lists_exactly_the_existing_scripts():
    rows = re.findall(r"^\| \[([\w.]+)\]\(([\w.]+)\)", (FOLDER / "README.md").read_text(), flags=re.MULTILINE)
    assert all(text == link for text, link in rows)
    scripts = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".sh"))
    assert sorted(link for _, link in rows) == scripts


@pytest.mark.slow
def test_gpu_table_times_cells_in_processes_of_their_own():
    sys.path.insert(0, str(FOLDER))
    try:
        import gpu_table
    finally:
        sys.path.remove(str(FOLDER))
    options = dict(size=64, batch=2, dtype="float32", plain=True)
    cells = [gpu_table.Cell("svit_nano", mode, options | dict(mode=mode)) for mode in ("inference", "train")]
    cells.append(gpu_table.Cell("svit_nano", "wrong", options | dict(mode="train", optimized=True)))
    args = argparse.Namespace(device="cpu", rounds=2, seconds=0.1, jobs=3, profiles=False)
    result = gpu_table.run_group(cells, float("inf"), args)
    assert [row["column"] for row in result["rows"]] == ["inference", "train"]
    assert result["notes"] == ["svit_nano, wrong: stopped"]
    for row in result["rows"]:
        assert row["images_per_second"] == pytest.approx(2 / row["seconds"])
        assert row["first_call"] > 0
        assert row["params"] == 2_997_144
