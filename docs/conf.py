"""Configuration of the documentation site: `make docs` builds it into docs/_build/html, without the network."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import saccade

project = "saccade"
copyright = "the saccade authors, Apache-2.0"
version = release = saccade.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "api_pages",
    "figure_links",
    "source_pages",
]
exclude_patterns = ["_build", "gallery", "examples/*.ipynb", "examples/*.py", "examples/*.zip", "examples/*.json"]

# Markdown
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4  # GitHub's anchors, so that links work there and here
suppress_warnings = [
    "myst.header",  # pages of results begin some sections two levels deeper
]

# API reference, from docstrings and annotations
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # those of torch and Lightning use roles of their own sites
python_use_unqualified_type_names = True
add_module_names = False
default_role = "code"

# Pages
html_theme = "furo"
html_title = "saccade"
html_static_path = ["_static"]
html_css_files = ["saccade.css"]
html_extra_path = ["../llms.txt"]
html_copy_source = False
html_show_sourcelink = False
html_favicon = "_static/icon.svg"
html_logo = "_static/icon.svg"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6f8f", "color-brand-content": "#0b6f8f"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_exclude = ".linenos, .gp, .go"

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"__init__\.py",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "remove_config_comments": True,
    "plot_gallery": True,
    "abort_on_example_error": True,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "matplotlib_animations": False,
    "reset_modules": ("matplotlib",),
}
