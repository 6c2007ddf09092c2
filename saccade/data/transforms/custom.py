"""A user's own augmentation, given by its name."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from saccade.data.sources.base import DataError


class CustomFirst:
    """A transform that is preceded by a user's function of its arguments: image, or image and mask or objects."""

    def __init__(self, function: Callable[..., Any], transform: Callable[..., Any]):
        self.function, self.transform = function, transform

    def __call__(self, *sample: Any) -> Any:
        changed = self.function(*sample)
        return self.transform(*(changed if len(sample) > 1 else (changed,)))


def with_custom(name: str, transform: Callable[..., Any]) -> Callable[..., Any]:
    """Return `transform`, preceded by the function `name` ("package.function", also from the current folder)."""
    if not name:
        return transform
    module, _, function = name.rpartition(".")
    sys.path.insert(0, "")
    try:
        return CustomFirst(getattr(importlib.import_module(module), function), transform)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"augment.custom: expected package.function, got {name!r} ({error}).") from error
    finally:
        sys.path.remove("")
