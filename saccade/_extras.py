"""Import optional dependencies where they are used; the error names the extra to install. Names of files as text."""

import ast
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or raise an ImportError that names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # installed but broken: its own error says more
        raise ImportError(
            f"{module.partition('.')[0]} is not installed. Run pip install 'saccade[{extra}]'."
        ) from error


def printable(path: str | os.PathLike) -> str:
    """A file name as text that can be written: bytes that are not UTF-8 become \\xff."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def package_version() -> str:
    """The installed version of saccade; "0.0.0" in a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("saccade")
    except PackageNotFoundError:
        return "0.0.0"


def lazy_imports(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports on first use what its block `if TYPE_CHECKING:` imports.

    The block is read from the source: names are listed once, where type checkers and readers expect them.
    """
    loader: Any = getattr(sys.modules[package].__spec__, "loader", None)
    blocks = [node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    places = {alias.name: str(node.module) for node in imports for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if places[name] == package:  # a package below it
            return import_module(f"{package}.{name}")
        return getattr(import_module(places[name]), name)

    return __getattr__
