"""Explain a model by its tokens: hooks that record them, figures, and scores.

`saccade.explain(images, model)` calls `saccade.explain.explanation.explain`, which is imported on the first call.

hooks    record traces and attention weights, scale single tokens
drawing  colours, overlays, alignment of maps with the image, figure sheets
figures  one module per figure of the papers, and the figures every family shares
scores   importance of tokens, and metrics on labelled images
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
