"""The constraint files agree with pyproject.toml."""

import re
import subprocess
import sys

import pytest

from tools.make_constraints import HEADERS, ROOT, TRANSITIVE, lowest, requirements, tomllib, version_key

DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text()) if (ROOT / "pyproject.toml").is_file() else {}


def test_lowest_file_is_current():
    assert (ROOT / "constraints-lowest.txt").read_text() == lowest(DOCUMENT), "run `python tools/make_constraints.py`"


@pytest.mark.parametrize("file", ["constraints-newest.txt", "constraints.txt"])
def test_installed_versions_cover_every_dependency_and_keep_its_floor(file):
    lines = (ROOT / file).read_text().splitlines()
    assert lines[:2] == HEADERS[file]
    pins = dict(re.split("==| ; ", line)[:2] for line in lines[2:])
    floors = requirements(DOCUMENT)
    assert pins.keys() == {*floors, *TRANSITIVE}, "run `make constraints`"
    assert [name for name, (floor, _) in floors.items() if version_key(pins[name]) < version_key(floor)] == []


def test_highest_floor_of_the_extras_decides():
    document = {
        "project": {
            "dependencies": ["Pillow>=12.2", "torch>=2.9"],
            "optional-dependencies": {
                "a": ["torch>=2.11,<3", "saccade[b]"],
                "b": ["x[y]>=1 ; sys_platform == 'linux'"],
            },
        }
    }
    assert requirements(document) == {
        "pillow": ("12.2", ""),
        "torch": ("2.11", ""),
        "x": ("1", "sys_platform == 'linux'"),
    }


def test_requirement_without_a_floor_is_refused():
    with pytest.raises(ValueError, match="expected a lower bound for torch"):
        requirements({"project": {"dependencies": ["torch"], "optional-dependencies": {}}})


def test_floors_with_security_fixes_stay():
    floors = requirements(DOCUMENT)
    assert floors["pillow"][0] == "12.2"
    assert floors["lightning"][0] == "2.6.6"


def test_setuptools_can_be_imported_after_the_tool():
    # Before Python 3.12, _distutils_hack gives up its distutils when pip is imported; setuptools then fails to import.
    code = "import sys, tools.make_constraints, setuptools; assert 'pip' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
