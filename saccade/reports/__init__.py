"""One template, one stylesheet and charts for every HTML page: training, explanation, scores, benchmark, demo."""

from saccade.reports.charts import line_chart, matrix_chart, to_image, to_png, to_svg
from saccade.reports.page import STYLE, Thumbnail, data_url, part, render

__all__ = [
    "STYLE",
    "Thumbnail",
    "data_url",
    "line_chart",
    "matrix_chart",
    "part",
    "render",
    "to_image",
    "to_png",
    "to_svg",
]
