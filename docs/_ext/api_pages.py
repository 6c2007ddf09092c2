"""Pages of the API reference: one for `saccade`, one per package, written when the site is built."""

import ast
import re
from inspect import isfunction
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import saccade
import saccade.ops

PACKAGE = Path(saccade.__file__).parent
# Packages with a page, and the modules to read first; the others follow in alphabetical order. Names that begin with an
# underscore are left out. Of ops only the switches: docs/dev/operations.md lists the operations. cli, web, reports,
# reproduce and weights are used through commands and HTTP.
PACKAGES = {
    "models": ("vt", "svit", "paca", "sparseformer", "sparseformer_v2", "video_sparseformer", "card", "checkpoint"),
    "tokens": ("visual_tokens", "projector", "super_tokens", "clusters", "regions", "trace"),
    "layers": ("attention", "relation"),
    "heads": ("vt_fpn", "fpn", "paca", "upernet", "sparse", "mask_rcnn", "cascade", "sparse_box"),
    "tasks": ("load", "predict", "results"),
    "data": ("loader", "open", "decode.inputs"),
    "engine": ("train", "recipe", "evaluate"),
    "explanation": ("explain", "hooks.record", "adapters.captum", "adapters.quantus", "adapters.grad_cam"),
    "inference": ("optimize", "export", "onnx_predict", "batch"),
    "benchmark": ("cost", "timing"),
}


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "api"))
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", without_factories)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}


def write_pages(folder: Path) -> None:
    """Write docs/api/saccade.rst and one page per package; unchanged files are left alone."""
    pages = {"saccade": public_page(), "ops": switches_page()}
    pages |= {package: package_page(package) for package in PACKAGES}
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


def switches_page() -> str:
    """The functions of `saccade.ops` that are not registered operations."""
    functions = [name for name in saccade.ops.__all__ if isfunction(getattr(saccade.ops, name))]
    lines = [*heading("saccade.ops"), "Switches and helpers of :doc:`the operations <../dev/operations>`.", ""]
    return "\n".join([*lines, *(f".. autofunction:: saccade.ops.{name}\n" for name in functions)])


def modules_of(package: str) -> list[str]:
    """Public modules of a package that define something: the first ones of `PACKAGES`, then the others."""
    files = sorted((PACKAGE / package).rglob("*.py"))
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for file in files]
    first = [f"{package}.{name}" for name in PACKAGES[package]]
    public = [name for name in names if not any(part.startswith("_") for part in name.split("."))]
    return [*first, *(name for name in public if name not in first and definitions(name))]


def package_page(package: str) -> str:
    lines = heading(f"saccade.{package}")
    for module in modules_of(package):
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


def without_factories(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """`<factory>`, the default of a dataclass field, is not Python: Sphinx would not read the signature's types."""
    return signature and signature.replace("<factory>", "..."), returns


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
