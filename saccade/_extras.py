"""Optional dependencies: imported where used, with an error that names the extra."""

from importlib import import_module
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the package is there but broken: its own message is the better one
        raise ImportError(f"this needs {module.partition('.')[0]}: pip install 'saccade[{extra}]'") from error
