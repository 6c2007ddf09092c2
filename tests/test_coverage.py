"""docs/papers/coverage.md: every item of the checklist has a test or a reason, or is one of the open ones."""

import pytest

from tools import make_coverage

# What is not done yet.
OPEN: set[str] = set()


@pytest.fixture(scope="module")
def sections():
    return make_coverage.read_sections()


@pytest.fixture(scope="module")
def tests():
    return make_coverage.find_tests()


def test_checklist_has_323_items(sections):
    ids = [item.id for item in make_coverage.all_items(sections)]
    assert len(ids) == len(set(ids)) == 323


def test_every_item_has_a_test_or_a_reason(sections, tests):
    """No unknown id, no file of a section that does not exist."""
    assert make_coverage.find_problems(sections, tests) == []


def test_open_items_are_exactly_these(sections):
    assert {item.id for item in make_coverage.all_items(sections) if item.missing} == OPEN


def test_page_is_current(sections, tests):
    page = make_coverage.render(sections, tests)
    assert make_coverage.PAGE.read_text() == page, "run python tools/make_coverage.py"


def test_citations_are_expanded():
    assert make_coverage.expand("3-5, 7 and 9") == {3, 4, 5, 7, 9}


def test_unknown_id_and_missing_test_are_problems(sections, tests):
    unknown = {"VT-99": [make_coverage.Test("tests/test_x.py", 3, "test_x")]}
    without = {id: shown_by for id, shown_by in tests.items() if id != "VT-01"}
    assert make_coverage.find_problems(sections, tests | unknown) == [
        "tests/test_x.py:3: test_x shows VT-99, which is not in checklist.md"
    ]
    (problem,) = make_coverage.find_problems(sections, without)
    assert problem.startswith("VT-01 has no test and no reason")
