"""Listen to a model, turn what it reports into maps, pictures and scores.

`saccade.explain` is a package and a function at once: `saccade.explain(images, model)` draws, and
`saccade.explain.hooks.record`, `saccade.explain.figures.mosaic`, … are its parts. Nothing of the drawing is imported before it is
called.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, images: Any, model: Any, **options: Any) -> Any:
        """See `saccade.explain.explanation.explain`."""
        from saccade.explain.explanation import explain

        return explain(images, model, **options)


sys.modules[__name__].__class__ = _CallablePackage
