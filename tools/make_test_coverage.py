"""Write docs/test_coverage.md: line and branch coverage per package, and why the rest does not run in the suite.

    make coverage                                          # run the suite with coverage, then
    python tools/make_test_coverage.py build/coverage.json # write the page
    python tools/make_test_coverage.py build/coverage.json --missing   # print the lines without a reason

tools/coverage_reasons.txt has the reasons: `glob of files | glob of functions | reason`; `(module)` is code outside of
functions; the first row that matches decides. Exit code: 1 if a line has no reason or a row matches nothing.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "test_coverage.md"
REASONS = Path(__file__).with_name("coverage_reasons.txt")
MODULE = "(module)"


class Rule(NamedTuple):
    """A row of coverage_reasons.txt."""

    files: str
    functions: str
    reason: str


class Gap(NamedTuple):
    """What did not run of a function: lines, and jumps between lines that did run."""

    file: str
    function: str
    lines: list[int]
    jumps: list[tuple[int, int]]


def read_rules(text: str) -> list[Rule]:
    """The rows of coverage_reasons.txt."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [Rule(*(part.strip() for part in line.split("|", 2))) for line in lines]


def find_gaps(report: dict) -> Iterator[Gap]:
    """Every function with lines or branches that did not run."""
    for file, entry in sorted(report["files"].items()):
        for name, function in sorted(entry["functions"].items(), key=lambda item: item[1].get("start_line", 0)):
            lines = function["missing_lines"]
            jumps = [(start, end) for start, end in function["missing_branches"] if not {start, abs(end)} & set(lines)]
            if lines or jumps:
                yield Gap(file, name or MODULE, lines, jumps)


def sort_gaps(gaps: list[Gap], rules: list[Rule]) -> tuple[dict[str, list[Gap]], list[Gap], list[Rule]]:
    """(gaps by reason, in the order of the rules; gaps without a reason; rules that match nothing)."""
    by_reason: dict[str, list[Gap]] = {rule.reason: [] for rule in rules}
    used, without = set(), []
    for gap in gaps:
        matches = [r for r in rules if fnmatchcase(gap.file, r.files) and fnmatchcase(gap.function, r.functions)]
        if matches:
            used.add(matches[0])
            by_reason[matches[0].reason].append(gap)
        else:
            without.append(gap)
    return by_reason, without, [rule for rule in rules if rule not in used]


def package_rows(report: dict) -> list[str]:
    """The table of packages: statements and branches, and the percentages that ran."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for file, entry in report["files"].items():
        parts = Path(file).parts
        summary = entry["summary"]
        values = [summary[key] for key in ("num_statements", "covered_lines", "num_branches", "covered_branches")]
        for package in (parts[1] if len(parts) > 2 else "saccade/*.py", "**all**"):
            totals[package] = [a + b for a, b in zip(totals[package], values, strict=True)]
    rows = ["| package | statements | ran | branches | taken |", "|---|---|---|---|---|"]
    for package, (statements, ran, branches, taken) in sorted(totals.items(), key=lambda item: item[0].strip("*")):
        name = package if package.startswith("**") else f"`{package}`"
        rows.append(
            f"| {name} | {statements:,} | {percent(ran, statements)} | {branches:,} | {percent(taken, branches)} |"
        )
    total = next(row for row in rows if "**all**" in row)
    return [*(row for row in rows if row is not total), total]


def percent(part: int, total: int) -> str:
    """Rounded down: 100 % means all."""
    return f"{part * 1000 // total / 10:.1f} %" if total else "–"


def ranges(lines: list[int]) -> str:
    """3-5, 9 of [3, 4, 5, 9]."""
    spans: list[list[int]] = []
    for line in lines:
        if spans and line == spans[-1][1] + 1:
            spans[-1][1] = line
        else:
            spans.append([line, line])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def describe(gap: Gap) -> str:
    """The lines and jumps of a gap: `12-14, 20→23`; a jump out of a function is `20→end`."""
    jumps = [f"{start}→{end if end > 0 else 'end'}" for start, end in gap.jumps]
    return ", ".join(filter(None, [ranges(gap.lines), *jumps]))


def page(report: dict, rules: list[Rule], environment: str) -> str:
    """The text of docs/test_coverage.md."""
    by_reason, without, _ = sort_gaps(list(find_gaps(report)), rules)
    text = [
        "# Test coverage",
        "",
        "Lines and branches of the package that the default tier of the suite runs, subprocesses included. `make",
        "coverage` measures and writes this page; the reasons are in `tools/coverage_reasons.txt`.",
        "",
        environment,
        "",
        *package_rows(report),
        "",
        "## What does not run",
        "",
        "Lines, and jumps between two lines that both ran (`20→23`: line 23 never came after line 20), by reason.",
    ]
    groups = [(reason, gaps) for reason, gaps in by_reason.items() if gaps]
    if without:
        groups.append(("Without a reason yet", without))
    for reason, gaps in groups:
        lines, jumps = sum(len(gap.lines) for gap in gaps), sum(len(gap.jumps) for gap in gaps)
        text += ["", f"### {reason}", "", f"{lines} lines, {jumps} jumps.", ""]
        text += ["| file | function | lines |", "|---|---|---|"]
        text += [f"| `{gap.file}` | `{gap.function}` | {describe(gap)} |" for gap in gaps]
    return "\n".join(text) + "\n"


def describe_commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"lines are those of commit {commit}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what --cov-report=json wrote")
    parser.add_argument("--missing", action="store_true", help="print the lines without a reason; write nothing")
    parser.add_argument("--environment", help="what was measured, if it was not this environment and commit")
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    rules = read_rules(REASONS.read_text(encoding="utf-8"))
    _, without, unused = sort_gaps(list(find_gaps(report)), rules)
    for gap in without:
        print(f"{gap.file}: {gap.function}: {describe(gap)}: no reason in {REASONS.name}")
    for rule in unused:
        print(f"{REASONS.name}: {' | '.join(rule)}: matches nothing")
    if not options.missing:
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "coverage"))
        environment = f"Python {python_version()}, {packages}, on a CPU; {describe_commit()}"
        text = page(report, rules, f"Measured with {options.environment or environment}.")
        PAGE.write_text(text, encoding="utf-8")
    return 1 if without or unused else 0


if __name__ == "__main__":
    sys.exit(main())
