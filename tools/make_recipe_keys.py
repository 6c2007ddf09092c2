"""Write docs/recipe_keys.md, every key of a recipe with its type, default and meaning, from `saccade.engine.recipe`.

python tools/make_recipe_keys.py           # write
python tools/make_recipe_keys.py --check   # fail if the page is out of date
"""

import ast
import inspect
import sys
from pathlib import Path

from saccade.engine import recipe

PAGE = Path(__file__).parent.parent / "docs" / "recipe_keys.md"
HEADER = """# Recipe keys

Generated from `saccade/engine/recipe.py` by `python tools/make_recipe_keys.py`. A key is set in a recipe file
(`optimizer: {lr: 5e-4}`), by `--set optimizer.lr=5e-4`, or in Python by `saccade.train(…, optimizer={"lr": 5e-4})`.
[training.md](training.md) explains recipes and has the short flags.
"""


def page() -> str:
    """The page: one table for the top level and one per group."""
    source = inspect.getsource(recipe)
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    top = rows(classes["Recipe"], lines, "", skip=set(classes))
    sections = [f"## Top level\n\n{table(top)}"]
    for entry in classes["Recipe"].body:
        if isinstance(entry, ast.AnnAssign) and ast.unparse(entry.annotation) in classes:
            group, node = ast.unparse(entry.target), classes[ast.unparse(entry.annotation)]
            text = ast.get_docstring(node) or ""
            sections.append(f"## {group}\n\n{text}\n\n{table(rows(node, lines, f'{group}.'))}")
    return HEADER + "\n" + "\n\n".join(sections) + "\n"


def rows(node: ast.ClassDef, lines: list[str], prefix: str, skip: set[str] = frozenset()) -> list[tuple[str, ...]]:  # type: ignore[assignment]
    """Key, type, default and meaning of every field: the comment after it, else the comment lines above it."""
    result = []
    for entry in node.body:
        if not isinstance(entry, ast.AnnAssign) or ast.unparse(entry.annotation) in skip:
            continue
        name, kind = ast.unparse(entry.target), ast.unparse(entry.annotation)
        default = ast.unparse(entry.value) if entry.value else ""
        default = {"field(default_factory=dict)": "{}", "field(default_factory=list)": "[]"}.get(default, default)
        end = entry.end_lineno or entry.lineno
        comment = lines[end - 1][entry.end_col_offset or 0 :].strip().removeprefix("#").strip()
        above, number = [], entry.lineno - 2
        while not comment and lines[number].strip().startswith("#"):
            above.insert(0, lines[number].strip().removeprefix("#").strip())
            number -= 1
        result.append((f"{prefix}{name}", kind, default, comment or " ".join(above)))
    return result


def table(entries: list[tuple[str, ...]]) -> str:
    def cell(text: str) -> str:
        return text.replace("|", r"\|")

    body = [f"| `{key}` | `{cell(kind)}` | `{cell(default)}` | {cell(text)} |" for key, kind, default, text in entries]
    return "\n".join(["| key | type | default | |", "|---|---|---|---|", *body])


def main() -> int:
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != page():
            print("docs/recipe_keys.md is out of date. Run python tools/make_recipe_keys.py.", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
