"""Write constraints-lowest.txt: the lower bounds of pyproject.toml; and the files of installed versions.

    python tools/make_constraints.py                                     # constraints-lowest.txt
    python tools/make_constraints.py --installed constraints-newest.txt  # also the versions of the running environment
    python tools/make_constraints.py --installed constraints.txt         # those that `make test` installs

`make constraints` installs the newest versions and writes the first two. `make test-lowest` and `make test-newest`
run the suite with them.
"""

import argparse
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10: pytest requires tomli. Importing pip's copy would turn off setuptools' distutils
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
HEADERS = {
    "constraints-lowest.txt": [
        "# The lowest versions that pyproject.toml allows; written by tools/make_constraints.py.",
        "# `make test-lowest` runs the suite with them on Python 3.10.",
    ],
    "constraints-newest.txt": [
        "# The newest versions that pyproject.toml allows; written by `make constraints`.",
        "# `make test-newest` runs the suite with them on Python 3.13.",
    ],
    "constraints.txt": [
        "# A set of versions the suite passes with, for reproducible installs: pip install -c constraints.txt saccade",
        "# On an older Python, pyproject.toml's lower bounds decide.",
    ],
}
# Pinned besides the direct dependencies: what they refuse or break with in other versions.
TRANSITIVE = ("aiohttp", "ftfy", "gradio_client", "markdown-it-py", "tokenizers")
REQUIREMENT = re.compile(r"^(?P<name>[\w.-]+)(?:\[[\w,]+\])?\s*(?P<bounds>[^;]*)(?:;(?P<marker>.*))?$")


def requirements(document: dict) -> dict[str, tuple[str, str]]:
    """Name -> (floor, marker) of every direct dependency, the highest floor of its extras; saccade itself left out."""
    project = document["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    floors: dict[str, tuple[str, str]] = {}
    for line in lines:
        match = REQUIREMENT.match(line)
        if match is None:
            raise ValueError(f"expected a requirement such as torch>=2.11, got {line!r}.")
        name = match["name"].lower()
        if name == "saccade":
            continue
        floor = re.search(r">=\s*([\w.]+)", match["bounds"])
        if floor is None:
            raise ValueError(f"expected a lower bound for {name}, got {line!r}. Add >=VERSION in pyproject.toml.")
        if name not in floors or version_key(floor[1]) > version_key(floors[name][0]):
            floors[name] = floor[1], (match["marker"] or "").strip()
    return floors


def version_key(text: str) -> tuple[int, ...]:
    """(2, 11) of 2.11, to compare versions."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def lowest(document: dict) -> str:
    """The text of constraints-lowest.txt."""
    rows = [
        f"{name}=={floor}" + (f" ; {marker}" if marker else "")
        for name, (floor, marker) in sorted(requirements(document).items())
    ]
    return "\n".join([*HEADERS["constraints-lowest.txt"], *rows]) + "\n"


def installed(document: dict, file: str) -> str:
    """The text of a file with the versions of the running environment, for its Python and later ones."""
    python = f'python_version >= "{sys.version_info.major}.{sys.version_info.minor}"'
    floors = requirements(document)
    rows, missing = [], []
    for name in sorted({*floors, *TRANSITIVE}):
        try:
            rows.append(f"{name}=={version(name).partition('+')[0]} ; {python}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        raise SystemExit(
            f"expected every dependency to be installed, got none of {', '.join(missing)}. Install '.[dev,scale,fuzz]'."
        )
    return "\n".join([*HEADERS[file], *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--installed", choices=["constraints-newest.txt", "constraints.txt"], help="write this file, too"
    )
    options = parser.parse_args()
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (ROOT / "constraints-lowest.txt").write_text(lowest(document), encoding="utf-8")
    if options.installed:
        (ROOT / options.installed).write_text(installed(document, options.installed), encoding="utf-8")


if __name__ == "__main__":
    main()
