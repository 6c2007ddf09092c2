"""docs/test_coverage.md: what did not run, grouped by reason."""

from pathlib import Path

from tools.make_test_coverage import (
    MODULE,
    REASONS,
    ROOT,
    Rule,
    describe,
    find_gaps,
    package_rows,
    page,
    read_rules,
    sort_gaps,
)

SUMMARY = {"num_statements": 8, "covered_lines": 5, "num_branches": 4, "covered_branches": 1}
REPORT = {
    "files": {
        "saccade/ops/conv.py": {
            "summary": SUMMARY,
            "functions": {
                "": {"missing_lines": [], "missing_branches": []},
                "kernel": {"missing_lines": [3, 4, 5, 9], "missing_branches": [[2, 3], [2, 7], [10, -1]]},
            },
        },
        "saccade/_files.py": {
            "summary": {"num_statements": 2, "covered_lines": 2, "num_branches": 0, "covered_branches": 0},
            "functions": {"": {"missing_lines": [1], "missing_branches": []}},
        },
    }
}
RULES = [Rule("saccade/ops/*", "kernel", "Needs a GPU"), Rule("saccade/web/*", "*", "Never")]


def test_jump_to_a_line_that_did_not_run_is_not_listed_twice():
    gap = next(gap for gap in find_gaps(REPORT) if gap.function == "kernel")
    assert describe(gap) == "3-5, 9, 2→7, 10→end"


def test_gaps_and_rules_without_a_counterpart_are_found():
    by_reason, without, unused = sort_gaps(list(find_gaps(REPORT)), RULES)
    assert [gap.file for gap in by_reason["Needs a GPU"]] == ["saccade/ops/conv.py"]
    assert [(gap.file, gap.function) for gap in without] == [("saccade/_files.py", MODULE)]
    assert unused == RULES[1:]


def test_percentages_are_rounded_down_and_summed_over_packages():
    rows = package_rows(REPORT)
    assert "| `ops` | 8 | 62.5 % | 4 | 25.0 % |" in rows
    assert "| `saccade/*.py` | 2 | 100.0 % | 0 | – |" in rows
    assert rows[-1] == "| **all** | 10 | 70.0 % | 4 | 25.0 % |"


def test_page_names_what_has_no_reason():
    text = page(REPORT, RULES, "Python")
    assert "### Needs a GPU\n\n4 lines, 2 jumps." in text
    assert "### Without a reason yet\n\n1 lines, 0 jumps." in text
    assert "### Never" not in text


def test_reasons_name_files_that_exist():
    rules = read_rules(Path(REASONS).read_text())
    assert [rule for rule in rules if not list(ROOT.glob(rule.files))] == []
