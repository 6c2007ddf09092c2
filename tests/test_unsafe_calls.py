"""Calls that would run code from files or reach rarely tested parsers do not occur in the package."""

import ast
from pathlib import Path

import pytest

import saccade

PACKAGE = Path(saccade.__file__).parent
ALLOWED = {
    ("models/checkpoint.py", "pickle"),  # the exception class that torch.load raises
    ("engine/recipe.py", "yaml.load"),  # with a subclass of SafeLoader
}
SERIALISERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def unsafe_calls(source: str) -> list[tuple[int, str]]:
    """Line and kind of every unsafe call or import."""
    findings = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            findings += [(node.lineno, name.partition(".")[0]) for name in modules if name.split(".")[0] in SERIALISERS]
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        is_constant = {key: isinstance(value, ast.Constant) and value.value is True for key, value in keywords.items()}
        if name.endswith("Image.open") and "formats" not in keywords:
            findings.append((node.lineno, "Image.open"))
        if name.endswith("torch.load") and not is_constant.get("weights_only"):
            findings.append((node.lineno, "torch.load"))
        if name.endswith("numpy.load") or name.endswith("np.load"):
            allow = keywords.get("allow_pickle")
            if allow is not None and not (isinstance(allow, ast.Constant) and allow.value is False):
                findings.append((node.lineno, "np.load"))
        if name in ("eval", "exec", "os.system", "os.popen"):
            findings.append((node.lineno, name))
        if "shell" in keywords:
            findings.append((node.lineno, "shell"))
        if name.endswith(("yaml.load", "yaml.full_load", "yaml.unsafe_load")):
            findings.append((node.lineno, "yaml.load"))
    return findings


def test_package_has_no_unsafe_calls():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    findings = {
        (file.relative_to(PACKAGE).as_posix(), kind): line
        for file in files
        for line, kind in unsafe_calls(file.read_text(encoding="utf-8"))
    }
    assert {key: line for key, line in findings.items() if key not in ALLOWED} == {}
    assert set(findings) == ALLOWED  # no exception that nothing needs


@pytest.mark.parametrize(
    "line",
    [
        "Image.open(path)",
        "PIL.Image.open(path, 'r')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "subprocess.run(command, shell=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_unsafe_calls_are_recognised(line):
    assert len(unsafe_calls(line)) == 1


def test_safe_calls_are_accepted():
    lines = (
        "Image.open(a, formats=f); torch.load(a, weights_only=True); model.eval(); literal_eval(a); yaml.safe_load(a)"
    )
    assert unsafe_calls(lines) == []
