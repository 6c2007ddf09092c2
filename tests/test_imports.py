"""The rooms of the house, and which door leads where (CONTRIBUTING has the table with its reasons)."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "saccade"
MAY_IMPORT = {
    "ops": {"ops"},
    "layers": {"layers", "kernels", "ops"},
    "tokens": {"layers", "kernels", "ops", "tokens"},
    "kernels": {"kernels"},
    "models": {"tokens", "layers", "models", "ops"},
    "heads": {"tokens", "layers", "heads", "ops"},
    "tasks": {"heads", "models", "tasks", "layers"},
    "data": {"data"},
    "engine": {"tasks", "data", "engine", "models", "benchmark", "inference"},
    "explain": {"models", "tasks", "tokens", "explain", "data", "layers", "ops"},
    "export": {"models", "tasks", "tokens", "export"},
    "benchmark": {"models", "tasks", "tokens", "benchmark", "inference"},
    "inference": {"layers", "inference", "ops"},
}
ONLY_TRACE = {"explain", "export", "benchmark"}  # of tokens/, they may know the traces alone
EVERYWHERE = {"_extras", "weights"}  # leaves: they import nothing of the house


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every saccade import in a file, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "saccade":
            names = [f"saccade.{alias.name}" for alias in node.names] if node.module == "saccade" else [node.module]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "saccade"]
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_the_right_way(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room not in MAY_IMPORT:  # the package's front door, cli and web see everything
        assert room in {"__init__", "cli", "web", "_extras", "py.typed", "weights"}, f"{room} has no row in the table"
        return
    for line, module in imports(path):
        target = module.split(".")[1] if "." in module else ""
        if target in EVERYWHERE:
            continue
        assert target not in {"cli", "web"}, f"{path}:{line}: nobody imports {target}; move the code down a room"
        assert target in MAY_IMPORT[room], (
            f"{path}:{line}: {room} may not import {module}; move the line to the room that may, or the code it needs"
        )
        if room in ONLY_TRACE and target == "tokens":
            assert module == "saccade.tokens.trace", f"{path}:{line}: {room} knows tokens by their traces only"


def test_the_table_sees_every_file():
    assert len(FILES) > 15


def test_importing_saccade_is_light():
    """No plotting, training or web library comes with `import saccade`."""
    import subprocess

    heavy = "matplotlib lightning torchmetrics gradio jsonargparse pyarrow onnx skimage scipy rich"
    code = f"import sys, saccade; print(*[m for m in '{heavy}'.split() if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    timm_alone = f"import sys, timm; print(*[m for m in '{heavy}'.split() if m in sys.modules])"
    baseline = subprocess.run([sys.executable, "-c", timm_alone], capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) <= set(baseline.stdout.split())


def test_every_family_header_names_real_code():
    """Each family file opens with its row of the table; the names in it exist."""
    from importlib import import_module

    for path in sorted((PACKAGE / "models").glob("[a-z]*.py")):
        header = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows = [line.split() for line in header.splitlines() if line.startswith(("group ", "relate ", "put back "))]
        if not rows:
            continue
        assert len(rows) == 3, f"{path.name} has group, relate and put back"
        for words in rows:
            name = next(word for word in words if "." in word).rstrip(",;:")
            module, _, attribute = name.rpartition(".")
            assert hasattr(import_module(f"saccade.{module}"), attribute), f"{path.name}: {name}"
