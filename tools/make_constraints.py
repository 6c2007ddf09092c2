"""Write constraints-lowest.txt (the floors of pyproject.toml) and constraints.txt (the installed, newest versions).

    python tools/make_constraints.py            # constraints-lowest.txt
    python tools/make_constraints.py --newest   # constraints.txt too, from the running environment

`pip install -c constraints-lowest.txt -e '.[dev]'` installs the lowest allowed version of every direct dependency.
"""

import argparse
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import pip._vendor.tomli as tomllib

ROOT = Path(__file__).parent.parent
LOWEST_HEADER = [
    "# The lowest versions that pyproject.toml allows; written by tools/make_constraints.py.",
    "# pip install -c constraints-lowest.txt -e '.[dev]'",
]
NEWEST_HEADER = [
    "# A set of versions the suite passes with, for reproducible installs: pip install -c constraints.txt saccade",
    "# On Python 3.10, pyproject.toml's lower bounds decide.",
]
TRANSITIVE = ("aiohttp", "gradio_client")  # pinned in constraints.txt besides the direct dependencies
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
        if name not in floors or _key(floor[1]) > _key(floors[name][0]):
            floors[name] = floor[1], (match["marker"] or "").strip()
    return floors


def _key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def lowest(document: dict) -> str:
    """The text of constraints-lowest.txt."""
    rows = [
        f"{name}=={floor}" + (f" ; {marker}" if marker else "")
        for name, (floor, marker) in sorted(requirements(document).items())
    ]
    return "\n".join([*LOWEST_HEADER, *rows]) + "\n"


def newest(document: dict) -> str:
    """The text of constraints.txt, from the installed packages."""
    rows = []
    for name in sorted({*requirements(document), *TRANSITIVE}):
        try:
            rows.append(f'{name}=={version(name).partition("+")[0]} ; python_version >= "3.11"')
        except PackageNotFoundError:
            continue  # an extra that is not installed
    return "\n".join([*NEWEST_HEADER, *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newest", action="store_true", help="write constraints.txt, too")
    options = parser.parse_args()
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (ROOT / "constraints-lowest.txt").write_text(lowest(document), encoding="utf-8")
    if options.newest:
        (ROOT / "constraints.txt").write_text(newest(document), encoding="utf-8")


if __name__ == "__main__":
    main()
