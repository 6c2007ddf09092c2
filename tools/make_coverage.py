"""Write docs/papers/coverage.md: for every item of docs/papers/checklist.md, the code, the tests and the status.

    python tools/make_coverage.py            # write the page
    python tools/make_coverage.py --check    # exit 1 if it is stale, an item lacks test and reason, or an id is unknown

Tests name items with `@pytest.mark.shows("SVIT-03", ...)`; the markers are read from the syntax tree, without importing
the tests.
"""

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CHECKLIST = ROOT / "docs" / "papers" / "checklist.md"
PAGE = CHECKLIST.with_name("coverage.md")
STATEMENT_LENGTH = 140
PAPERS = {"VT": "VT", "VTR": "VT", "PACA": "PaCa", "SF": "SparseFormer", "SVIT": "SViT"}  # as code cites them

ITEM = re.compile(r"- \*\*([A-Z]+-\d{2})\*\* (.+)")
HEADING = re.compile(r"###? (\d+\.\d* .+)")
STATUS = re.compile(r" \((not testable here|open): (.+)\)$")
PLACE = re.compile(
    r"\b(?:Eqs?\.|Equations?|Tables?|Figures?|Listing|Algorithm|[Ss]ections?) [A-Z]?\d[\d.]*[a-e]?(?:[–-]\d+[a-e]?)?"
    r"|\b(?:section |Appendix )?A\.\d\b"
)
CITED = re.compile(
    r"(?P<paper>VT|SViT|PaCa|SparseFormer) Eqs?\. (?P<numbers>\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*)"
)


@dataclass
class Item:
    """One line of the checklist."""

    id: str
    statement: str
    reason: str = ""  # why no test can show it
    missing: str = ""  # what is not done yet

    @property
    def paper(self) -> str:
        return PAPERS.get(self.id.partition("-")[0], "")


@dataclass
class Section:
    title: str
    files: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)


class Test(NamedTuple):
    """A test function and the line of its definition."""

    path: str
    line: int
    name: str


def read_sections(path: Path = CHECKLIST) -> list[Section]:
    """Return the sections that have items, in the order of the page."""
    sections: list[Section] = []
    for line in path.read_text().splitlines():
        if heading := HEADING.match(line):
            sections.append(Section(heading[1]))
        elif line.startswith("Code: "):
            sections[-1].files = line.removeprefix("Code: ").split(", ")
        elif item := ITEM.match(line):
            status = STATUS.search(item[2])
            statement = STATUS.sub("", item[2])
            texts = {status[1]: status[2]} if status else {}
            sections[-1].items.append(
                Item(item[1], statement, texts.get("not testable here", ""), texts.get("open", ""))
            )
    return [section for section in sections if section.items]


def markers(function: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yield the ids in the `pytest.mark.shows(...)` decorators of a test function or class."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.shows":
            yield from (argument.value for argument in decorator.args if isinstance(argument, ast.Constant))


def find_tests(folder: Path = ROOT / "tests") -> dict[str, list[Test]]:
    """Return the tests of every id, sorted by path and line."""
    tests: dict[str, list[Test]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for id in markers(node):
                    tests[id].append(Test(path.relative_to(folder.parent).as_posix(), node.lineno, node.name))
    return {id: sorted(set(shown_by)) for id, shown_by in tests.items()}


def expand(cited: str) -> set[int]:
    """Return the equations of a citation: "3-5, 7" -> {3, 4, 5, 7}."""
    equations: set[int] = set()
    for part in re.split(", | and ", cited):
        first, _, last = part.partition("-")
        equations |= set(range(int(first), int(last or first) + 1))
    return equations


@cache
def citations() -> dict[tuple[str, int], list[tuple[str, int]]]:
    """Return (file, line) of every equation that the package cites, single equations before ranges."""
    lines: dict[tuple[str, int], list[tuple[int, str, int]]] = defaultdict(list)
    for path in sorted((ROOT / "saccade").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in CITED.finditer(line):
                equations = expand(match["numbers"])
                for equation in equations:
                    place = len(equations), path.relative_to(ROOT).as_posix(), number
                    lines[match["paper"], equation].append(place)
    return {key: [(file, line) for _, file, line in sorted(places)] for key, places in lines.items()}


def equations_of(item: Item) -> list[int]:
    """Return the equations that an item names, in order."""
    equations: list[int] = []
    for cited in re.findall(r"\bEqs?\. (\d+(?:[–-]\d+)?(?:, \d+(?:[–-]\d+)?)*)", item.statement):
        equations += sorted(expand(cited.replace("–", "-")))
    return equations


def link(path: str, line: int | None = None) -> str:
    """Return a Markdown link from the page to a file, or to a line of it."""
    text = Path(path).name + (f":{line}" if line else "")
    return f"[{text}](../../{path}" + (f"#L{line}" if line else "") + ")"


def code_of(item: Item, section: Section) -> str:
    """Return links to the lines that cite the item's equations, else to the files of its section."""
    places: dict[str, int] = {}
    for equation in equations_of(item):
        for file, line in citations().get((item.paper, equation), [])[:2]:
            places.setdefault(file, line)
    links = [link(file, line) for file, line in places.items()]
    return " ".join(links or [link(file) for file in section.files])


def shorten(statement: str, length: int = STATEMENT_LENGTH) -> str:
    """Return the statement, cut at a word after `length` characters, safe in a table cell."""
    if len(statement) > length:
        statement = statement[:length].rsplit(" ", 1)[0].rstrip(" ,;:(") + " …"
    if statement.count("`") % 2:
        statement += "`"
    return statement.replace("|", "\\|")


def status_of(item: Item, tests: list[Test]) -> str:
    parts = ["shown"] if tests and not item.missing else []
    parts += [f"not testable here: {item.reason}"] if item.reason else []
    parts += [f"open: {item.missing}"] if item.missing else []
    return "; ".join(parts) or "no test"


def count_statuses(sections: list[Section], tests: dict[str, list[Test]]) -> Counter[str]:
    """Return the number of items per status: open, then shown, then not testable here."""
    counts: Counter[str] = Counter()
    for item in all_items(sections):
        counts[status_of(item, tests.get(item.id, [])).partition(":")[0].partition(";")[0]] += 1
    return counts


def all_items(sections: list[Section]) -> list[Item]:
    return [item for section in sections for item in section.items]


def render(sections: list[Section], tests: dict[str, list[Test]]) -> str:
    counts = count_statuses(sections, tests)
    lines = [
        "# Coverage of the papers",
        "",
        "Written by `python tools/make_coverage.py` from [checklist.md](checklist.md), which has the full statements,",
        'and from the markers `@pytest.mark.shows("ID")` of the tests.',
        "",
        f"{counts.total()} items: " + ", ".join(f"{number} {status}" for status, number in counts.most_common()) + ".",
    ]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        lines += ["| id | statement | in the paper | code | tests | status |", "|---|---|---|---|---|---|"]
        for item in section.items:
            shown_by = tests.get(item.id, [])
            cells = (
                item.id,
                shorten(item.statement),
                ", ".join(dict.fromkeys(PLACE.findall(item.statement))),
                code_of(item, section),
                " ".join(f"[{test.name.removeprefix('test_')}](../../{test.path})" for test in shown_by),
                status_of(item, shown_by),
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def find_problems(sections: list[Section], tests: dict[str, list[Test]]) -> list[str]:
    """Return one line per item without test or reason, unknown id, or file that does not exist."""
    items = all_items(sections)
    ids = Counter(item.id for item in items)
    problems = [f"{id} occurs {count} times in checklist.md" for id, count in ids.items() if count > 1]
    problems += [
        f"{item.id} has no test and no reason: mark a test with @pytest.mark.shows, or add (not testable here: ...)"
        for item in items
        if not (tests.get(item.id) or item.reason or item.missing)
    ]
    problems += [
        f"{test.path}:{test.line}: {test.name} shows {id}, which is not in checklist.md"
        for id in sorted(set(tests) - set(ids))
        for test in tests[id]
    ]
    problems += [
        f"section {section.title}: {file} does not exist"
        for section in sections
        for file in section.files
        if not (ROOT / file).is_file()
    ]
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    args = parser.parse_args(argv)
    sections, tests = read_sections(), find_tests()
    page, problems = render(sections, tests), find_problems(sections, tests)
    if not args.check:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        problems.append("docs/papers/coverage.md is stale. Run python tools/make_coverage.py.")
    print(*problems, sep="\n", end="\n" if problems else "")
    counts = count_statuses(sections, tests)
    print(f"{counts.total()} items: " + ", ".join(f"{number} {status}" for status, number in counts.most_common()))
    print("open:", *(item.id for item in all_items(sections) if item.missing))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
