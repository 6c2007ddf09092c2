"""benchmarks/README.md lists the scripts of benchmarks/."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_readme_lists_exactly_the_existing_scripts():
    rows = re.findall(r"^\| \[([\w.]+)\]\(([\w.]+)\)", (FOLDER / "README.md").read_text(), flags=re.MULTILINE)
    assert all(text == link for text, link in rows)
    scripts = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".sh"))
    assert sorted(link for _, link in rows) == scripts
