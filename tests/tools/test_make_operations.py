"""docs/dev/operations.md lists the operations of `saccade.ops.REGISTRY`."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from saccade import ops

SCRIPT = Path(__file__).parents[2] / "tools/make_operations.py"


def load():
    spec = spec_from_file_location("make_operations", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load()


def test_operations_page_is_up_to_date():
    text = tool.PAGE.read_text()
    assert tool.BEGIN in text
    assert tool.END in text
    assert tool.with_table(text) == text, "run python tools/make_operations.py"


def test_table_has_one_row_per_operation():
    rows = tool.table().splitlines()[2:]
    assert sorted(row.split("`")[1] for row in rows) == sorted(ops.REGISTRY)


def test_row_links_file_and_names_implementations():
    (row,) = [row for row in tool.table().splitlines() if row.startswith("| `add_norm` |")]
    assert row == (
        "| `add_norm` | [ops/layer_norm.py](../../saccade/ops/layer_norm.py) | `triton`, `reference` "
        "| The sum of features and update (B, C, H, W), and its norm over channels. |"
    )


def test_every_linked_file_exists():
    root = SCRIPT.parents[1] / "saccade"
    assert all((root / tool.file_of(op)).is_file() for op in ops.REGISTRY.values())
