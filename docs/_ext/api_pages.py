"""Pages of the API reference: one for `saccade`, one per package, written when the site is built."""

import ast
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import saccade

PACKAGE = Path(saccade.__file__).parent
# Public modules by page. Names that begin with an underscore are left out.
MODULES = {
    "models": ("models.vt", "models.svit", "models.paca", "models.sparseformer", "models.sparseformer_v2",
               "models.video_sparseformer", "models.card", "models.checkpoint", "models.registry"),
    "tokens": ("tokens.visual_tokens", "tokens.projector", "tokens.super_tokens", "tokens.clusters", "tokens.regions",
               "tokens.trace"),
    "layers": ("layers.attention", "layers.relation", "layers.boxes", "layers.mlp", "layers.norm", "layers.position",
               "layers.grid"),
    "heads": ("heads.vt_fpn", "heads.fpn", "heads.paca", "heads.upernet", "heads.sparse", "heads.mask_rcnn",
              "heads.cascade", "heads.sparse_box"),
    "tasks": ("tasks.load", "tasks.predict", "tasks.results", "tasks.segmentation", "tasks.detection"),
    "data": ("data.loader", "data.open", "data.open.inputs", "data.transforms.image", "data.synthetic.scenes",
             "data.synthetic.motions", "data.synthetic.photos"),
    "engine": ("engine.train", "engine.recipe", "engine.evaluate"),
    "explanation": ("explanation.explain", "explanation.hooks.record", "explanation.hooks.gates",
                    "explanation.scores.importance", "explanation.drawing.figure"),
    "inference": ("inference.optimize", "inference.export", "inference.onnx_predict", "inference.batch"),
    "benchmark": ("benchmark.cost", "benchmark.timing", "benchmark.machine", "benchmark.formulas"),
}  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "api"))
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}


def write_pages(folder: Path) -> None:
    """Write docs/api/saccade.rst and one page per package; unchanged files are left alone."""
    pages = {"saccade": public_page()}
    pages |= {package: package_page(package, modules) for package, modules in MODULES.items()}
    for name, text in pages.items():
        path = folder / f"{name}.rst"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def public_page() -> str:
    lines = [*heading("saccade"), "Everything of ``saccade.__all__``.", ""]
    for name in saccade.__all__:
        value = getattr(saccade, name)
        kind, options = ("class", ["   :members:"]) if isinstance(value, type) else ("function", [])
        lines += [f".. auto{kind}:: saccade.{name}", *options, ""]
    return "\n".join(lines)


def package_page(package: str, modules: tuple[str, ...]) -> str:
    lines = heading(f"saccade.{package}")
    for module in modules:
        lines += [*heading(f"saccade.{module}", "-"), f".. automodule:: saccade.{module}", ""]
        for kind, name in definitions(module):
            options = ["   :members:", "   :show-inheritance:"] if kind == "class" else []
            lines += [f".. auto{kind}:: saccade.{module}.{name}", *options, ""]
    return "\n".join(lines)


def heading(title: str, character: str = "=") -> list[str]:
    return [title, character * len(title), ""]


def definitions(module: str) -> list[tuple[str, str]]:
    """("class" or "function", name) of every public definition of a module, in its order."""
    path = PACKAGE / (module.replace(".", "/") + ".py")
    path = path if path.is_file() else path.with_suffix("") / "__init__.py"
    kinds = {ast.ClassDef: "class", ast.FunctionDef: "function"}
    nodes = [node for node in ast.parse(path.read_text()).body if type(node) in kinds]
    return [(kinds[type(node)], node.name) for node in nodes if not node.name.startswith("_")]


def as_restructured_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code` in backquotes: escape what reStructuredText would read as markup."""
    if lines and lines[0].startswith("Alias for field number"):  # of a NamedTuple: its type says more
        lines.clear()
    text, example, code = "\n".join(lines).partition("\nExample:\n")
    if re.search(r"^\|[-:| ]+\|$|^\w[\w ]*\S? {3,}\S", text, re.MULTILINE):  # a table keeps its columns
        text = "\n".join(["::", "", *(f"   {line}" for line in text.splitlines()), ""])
    else:
        parts = re.split(r"(``?[^`]+``?)", text)
        parts[::2] = [re.sub(r"[*|\\]|_(?=\W|$)", lambda match: "\\" + match[0], part) for part in parts[::2]]
        for i in range(1, len(parts), 2):  # `Layer`s: markup ends at a word boundary
            parts[i + 1] = re.sub(r"^(?=\w)", r"\\ ", parts[i + 1])
        text = "".join(parts)
    lines[:] = (text + example + code).splitlines()
