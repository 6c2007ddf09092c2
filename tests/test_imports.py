"""Which package may import which, and what models, layers, tokens and heads must not decide.

`python -m tests.test_imports` writes the table of `PACKAGES` into CONTRIBUTING.md.
"""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "saccade"
BEGIN, END = "<!-- import table: begin -->", "<!-- import table: end -->"


class Rule(NamedTuple):
    """What a package contains, and which packages (or single modules) it may import besides itself."""

    contains: str
    may_import: tuple[str, ...] = ()


PACKAGES = {
    "ops": Rule("fused operations: references, Triton kernels, dispatch, launcher", ("layers.boxes",)),
    "layers": Rule("plain modules: attention, convolution, MLP, norms, positions", ("ops",)),
    "tokens": Rule("pixels to tokens and back, one mechanism per file; traces", ("layers", "ops")),
    "models": Rule("one family per file; registry, checkpoints, cards", ("layers", "ops", "tokens", "weights")),
    "weights": Rule("weight files: embedded, released, on the Hugging Face Hub; timm's tags for them", ("models",)),
    "heads": Rule("features or tokens to raw outputs", ("layers", "ops", "tokens")),
    "tasks": Rule(
        "what outputs mean: loss, decoding, metric, prediction",
        ("data", "heads", "layers", "models", "weights"),
    ),
    "data": Rule("files to batches", ("weights.download",)),
    "reports": Rule("HTML templates, stylesheet and charts"),
    "inference": Rule(
        "whole-model transformations: folding, casting, CUDA graphs, export; batch prediction",
        ("data", "explanation.hooks", "heads", "layers", "models", "ops", "tasks", "tokens.trace"),
    ),
    "benchmark": Rule("cost and speed", ("inference", "models", "reports", "tasks", "tokens.trace")),
    "engine": Rule(
        "recipes, training, evaluation",
        ("benchmark", "data", "inference", "models", "reports", "tasks", "weights.tags"),
    ),
    "reproduce": Rule(
        "the papers' claims: declared comparisons, paired runs, verdicts",
        ("benchmark", "data", "engine", "models", "reports", "tasks", "weights.releases"),
    ),
    "explanation": Rule(
        "`saccade.record`, figures, scores",
        ("data", "layers", "models", "ops.enabled", "reports", "tasks", "tokens.locate", "tokens.trace", "weights"),
    ),
}
EVERYTHING = {"__init__", "cli", "web"}  # may import all packages; no package imports cli or web
LEAVES = {"_errors", "_extras", "_files"}  # import nothing of saccade; every package may import them
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every saccade import in a file, also inside functions."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "saccade":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Import):
            modules += [(node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "saccade"]
    return modules


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_package_imports_only_what_its_rule_allows(path):
    package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if package in EVERYTHING | LEAVES:
        return
    allowed = {package, *LEAVES, *PACKAGES[package].may_import}
    for line, module in imports(path):
        parts = module.split(".")[1:]
        assert {".".join(parts[:1]), ".".join(parts[:2])} & allowed, (
            f"{path}:{line}: {package} may not import {module}. Move the code to a package that may."
        )


def test_every_package_has_a_rule():
    packages = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert packages == set(PACKAGES) | EVERYTHING | LEAVES


# Fast paths live in `ops` and `inference`: the other packages do not test device, dtype, grad mode or torch.compile.
DECISIONS = re.compile(
    r"\bis_cuda\b|\bis_compiling\b|\bis_autocast|\bis_grad_enabled\b|\.requires_grad\b(?!_)|\bis_scripting\b|\bis_tracing\b"
    r"|_forward_hooks|\bis_contiguous\b"
)
ALLOWED_DECISIONS: dict[str, str] = {}  # "layers/file.py: line of code" -> reason


@pytest.mark.parametrize("package", ["models", "tokens", "heads", "layers"])
def test_package_does_not_choose_implementations(package):
    for path in sorted((PACKAGE / package).rglob("*.py")):
        code = ast.unparse(ast.parse(path.read_text()))  # without comments
        for line in code.splitlines():
            if DECISIONS.search(line):
                assert f"{path.relative_to(PACKAGE)}: {line.strip()}" in ALLOWED_DECISIONS, f"{path}: {line.strip()}"


HEAVY = "matplotlib jinja2 lightning torchmetrics gradio jsonargparse pyarrow onnx skimage scipy rich"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*[name for name in '{HEAVY}'.split() if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_saccade_loads_no_optional_package():
    assert loaded_by("import saccade") <= loaded_by("import timm")


FAMILIES = {"paca.py", "sparseformer.py", "sparseformer_v2.py", "svit.py", "video_sparseformer.py", "vt.py"}


def test_family_headers_name_existing_code():
    """Each family file opens with its rows group, relate, put back; the names in them resolve."""
    families = set()
    for path in sorted((PACKAGE / "models").glob("[a-z]*.py")):
        header = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows = [line.split() for line in header.splitlines() if line.startswith(("group ", "relate ", "put back "))]
        if not rows:
            continue
        families.add(path.name)
        assert len(rows) == 3, path.name
        for words in rows:
            name = next(word for word in words if "." in word).rstrip(",;:")
            module, _, attribute = name.rpartition(".")
            assert hasattr(import_module(f"saccade.{module}"), attribute), f"{path.name}: {name}"
    assert families == FAMILIES


def table() -> str:
    """The rules as a Markdown table."""
    rows = ["| package | contains | may import |", "|---|---|---|"]
    for name, rule in PACKAGES.items():
        allowed = ", ".join(f"`{package}`" for package in rule.may_import) or "nothing of saccade"
        rows.append(f"| `{name}` | {rule.contains} | {allowed} |")
    rows.append("| `cli`, `web` | command line, web page | everything; nothing imports them |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    before, _, after = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{after.partition(END)[2]}"


def test_contributing_has_the_import_table():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert BEGIN in text
    assert with_table(text) == text, "run `python -m tests.test_imports`"


if __name__ == "__main__":
    path = ROOT / "CONTRIBUTING.md"
    path.write_text(with_table(path.read_text()))
