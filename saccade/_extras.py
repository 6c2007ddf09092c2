"""Import optional dependencies where they are used; the error names the extra to install. Names of files as text."""

import os
from collections.abc import Callable, Mapping, Sequence
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


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose public names are imported on first use, {module below it: names}."""
    places = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return __getattr__
