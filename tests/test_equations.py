"""Every numbered equation of the papers is found by its name, in plain PyTorch, and on docs/equations.md."""

import pytest

from tools import make_equations


@pytest.mark.parametrize("equation", make_equations.EQUATIONS)
def test_equation_is_found_where_it_is_computed(equation):
    names = [place.name for place in make_equations.find_places().get(equation, [])]
    assert make_equations.EQUATIONS[equation][0] in names, names
    assert not any(name.endswith(": kernel") for name in names), names


def test_every_cited_equation_is_in_the_table():
    assert set(make_equations.find_places()) == set(make_equations.EQUATIONS)


def test_page_is_current():
    assert make_equations.PAGE.read_text() == make_equations.page(), "run python tools/make_equations.py"


def test_vt_eq_5_is_found_from_the_readme():
    """README -> docs/equations.md -> the row -> the file -> the line."""
    root = make_equations.ROOT
    assert "](docs/equations.md)" in (root / "README.md").read_text()
    (row,) = [line for line in make_equations.PAGE.read_text().splitlines() if line.startswith("| VT Eq. 5 |")]
    assert "`cross_attention_reference` in [ops/attention.py](../saccade/ops/attention.py)" in row
    place = make_equations.find_places()["VT Eq. 5"][0]
    assert (
        "scaled_dot_product_attention(query, key, value"
        in (root / "saccade" / place.file).read_text().splitlines()[place.line - 1]
    )
