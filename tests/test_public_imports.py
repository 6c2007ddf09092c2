"""Documentation, examples, command line and web page import public names only: `saccade.__all__` is the contract.

Public are `saccade` and the packages in `saccade.PACKAGES`, by the names in their `__all__`.
"""

import ast
import re
import typing
from importlib import import_module
from pathlib import Path

import pytest

import saccade

ROOT = Path(__file__).parent.parent
PUBLIC = {"saccade", "saccade.explanation.adapters", *(f"saccade.{name}" for name in saccade.PACKAGES)}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SCRIPTS = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("docs/gallery/*.py")])
PROGRAMS = sorted([*ROOT.glob("saccade/cli/*.py"), *ROOT.glob("saccade/web/*.py")])

# What command line and web page may import besides: each other, these packages, and modules with a reason.
SHARED = (
    "saccade.cli",
    "saccade.web",
    "saccade.reports",
    "saccade.weights",
    "saccade._errors",
    "saccade._extras",
    "saccade._files",
)
INTERNAL = {
    "saccade/cli/convert.py": (
        (
            "saccade.models.card",
            "saccade.models.checkpoint",
            "saccade.models.official",
            "saccade.tasks.load",
        ),
        "converts files: identifies models by their tensors, writes cards and metadata",
    ),
    "saccade/cli/bench.py": (("saccade.benchmark.batch",), "measures batch prediction, which needs pyarrow"),
    "saccade/cli/eval.py": (("saccade.engine",), "the names of metrics, for its tables"),
    "saccade/cli/export.py": (
        ("saccade.inference.export_check", "saccade.tasks", "saccade.weights.releases"),
        "tolerances; cards of untrained models; names of detectors and releases",
    ),
    "saccade/cli/models.py": (("saccade.benchmark.paper",), "the published numbers"),
    "saccade/cli/__init__.py": (("saccade.tasks.detection",), "the names of detection heads, to tell models apart"),
    "saccade/cli/pull.py": (
        ("saccade.tasks.load", "saccade.tasks.released"),
        "stores converted files without loading models",
    ),
    "saccade/cli/reproduce.py": (
        ("saccade.engine.results", "saccade.reproduce"),
        "the package of the command; the machine",
    ),
    "saccade/cli/train.py": (("saccade.engine.results",), "the names of metrics, for its summary"),
    "saccade/web/catalogue.py": (
        ("saccade.tasks.load",),
        "describes models from the metadata of their files, without loading weights",
    ),
}


def imported(code: str) -> list[tuple[str, str]]:
    """(module, name) of every import of saccade; name is empty for `import module`."""
    imports = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            imports += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in imports if module.split(".")[0] == "saccade"]


def code_of(path: Path) -> str:
    """A script, or the Python blocks of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    return "\n".join(re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def is_public(module: str, name: str) -> bool:
    if module not in PUBLIC:
        return False
    package: typing.Any = import_module(module)
    names = {*getattr(package, "__all__", ()), ""}
    if module == "saccade":
        names |= {*saccade.PACKAGES, "__version__", "weights"}
    if module == "saccade.models":
        names |= {"paca", "sparseformer", "sparseformer_v2", "svit", "video_sparseformer", "vt"}  # one file per family
    return name in names


@pytest.mark.parametrize("path", PAGES + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documentation_imports_public_names_only(path):
    for module, name in imported(code_of(path)):
        assert is_public(module, name), f"{path.name}: {module}.{name} is not public. Export it, or use another."


def test_documentation_is_read():
    pages = {path.name for path in PAGES if imported(code_of(path))}
    assert {"README.md", "data.md", "detection.md", "explain.md", "segmentation.md", "video.md"} <= pages
    assert SCRIPTS
    assert all(imported(code_of(path)) for path in SCRIPTS)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_import_public_names_only(path):
    file = str(path.relative_to(ROOT))
    allowed = SHARED + INTERNAL.get(file, ((), ""))[0]
    for module, name in imported(code_of(path)):
        assert module == "saccade" or name not in saccade.__all__, f"{file}: import {name} from saccade, not {module}."
        shared = any(module == entry or module.startswith(f"{entry}.") for entry in allowed)
        assert shared or is_public(module, name), f"{file}: {module}.{name} is neither public nor in INTERNAL."


def test_exceptions_are_used():
    for file, (modules, _) in INTERNAL.items():
        if not (ROOT / file).exists():
            continue
        used = {module for module, _ in imported((ROOT / file).read_text())}
        for entry in modules:
            assert any(module == entry or module.startswith(f"{entry}.") for module in used), f"{file}: {entry}"


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_public_names_exist_and_are_typed(package):
    """`__all__`, the imports for type checkers and the table of lazy names agree."""
    module = import_module(package)
    names = getattr(module, "__all__", [])
    assert all(hasattr(module, name) for name in names)
    source = Path(typing.cast(str, module.__file__)).read_text()
    if "TYPE_CHECKING" in source:
        block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
        typed = {alias.name for node in block.body for alias in typing.cast(ast.ImportFrom, node).names}
        assert typed - set(saccade.PACKAGES) == set(names)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
