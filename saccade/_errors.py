"""Wrong usage, which the command line tells apart from failure by the exit code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class UsageError(ValueError):
    """A request that is wrong for any data and on any machine.

    An unknown name, an impossible number, options that exclude each other, or one that the model or task lacks.
    """

    exit_code = 2  # of the command line


@contextmanager
def model_options(name: str, options: Mapping[str, Any], where: str = "--set") -> Iterator[None]:
    """Report what building a model with a user's options raises as wrong usage.

    For models on the meta device without weights: then nothing but the options can be the reason.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # models raise what their first computation with the options raises
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        built = f"{name} cannot be created with {given}: {reason}" if given else reason
        built += "" if built.endswith("?") else "."  # hints of Python 3.13: "Did you mean …?"
        raise UsageError(f"{built} Correct or remove it in {where}." if given else built) from error
