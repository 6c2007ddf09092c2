"""docs/recipe_keys.md is generated from the dataclasses of a recipe."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from saccade.engine.recipe import Recipe, _all_keys

SCRIPT = Path(__file__).parents[2] / "tools/make_recipe_keys.py"


def load_tool():
    spec = spec_from_file_location("make_recipe_keys", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_current_and_describes_every_key():
    tool = load_tool()
    text = tool.PAGE.read_text()
    assert text == tool.page(), "run python tools/make_recipe_keys.py"
    rows = re.findall(r"^\| `([\w.]+)` \| `.+?` \| `.*?` \| (.*) \|$", text, re.M)
    assert sorted(key for key, _ in rows) == sorted(_all_keys(Recipe))
    assert [key for key, meaning in rows if not meaning] == []


def test_comment_lines_above_a_field_describe_it():
    text = load_tool().page()
    assert "| `distill.teacher` | `str \\| None` | `None` | timm or saccade model names (with pretrained" in text
    assert "| `model.head` | `str` | `''` | Segmentation: vt_fpn" in text
