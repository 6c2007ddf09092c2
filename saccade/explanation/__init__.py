"""Explain a model by its tokens: hooks that record them, figures, and scores.

hooks     record traces and attention weights, scale single tokens
drawing   colours, overlays, alignment of maps with the image, figure sheets
figures   one module per figure of the papers, and the figures every family shares
scores    importance of tokens, and metrics on labelled images
adapters  the same for Quantus, Captum and pytorch-grad-cam
"""

from typing import TYPE_CHECKING

from saccade._extras import lazy_imports

if TYPE_CHECKING:
    from saccade.explanation.drawing.figure import Figure, Panel
    from saccade.explanation.drawing.overlay import downscale
    from saccade.explanation.image_explanation import IMPORTANCE_KINDS
    from saccade.explanation.images import MAX_SIDE
    from saccade.explanation.inspection import (
        Inspection,
        Stage,
        clamp_token,
        default_token,
        get_stage,
        inspect_image,
        mosaic_image,
        summarize,
        summarize_token,
        summary_sheet,
        token_at,
        token_image,
    )
    from saccade.explanation.report import figure_section, thumbnail
    from saccade.explanation.scores.importance import class_score, gradient_importance, occlusion_importance
    from saccade.explanation.scores.score import rows_as_text, score
    from saccade.explanation.subject import Subject, load_subject

__all__ = [
    "IMPORTANCE_KINDS",
    "MAX_SIDE",
    "Figure",
    "Inspection",
    "Panel",
    "Stage",
    "Subject",
    "clamp_token",
    "class_score",
    "default_token",
    "downscale",
    "figure_section",
    "get_stage",
    "gradient_importance",
    "inspect_image",
    "load_subject",
    "mosaic_image",
    "occlusion_importance",
    "rows_as_text",
    "score",
    "summarize",
    "summarize_token",
    "summary_sheet",
    "thumbnail",
    "token_at",
    "token_image",
]

__getattr__ = lazy_imports(__name__)
