"""Figures link to their files: on a phone, where a wide figure is small, a tap shows it in full size."""

import posixpath
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", link_figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}


def link_figures(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    if app.builder.format != "html":
        return
    folder = posixpath.dirname(app.builder.get_target_uri(docname))
    for image in list(doctree.findall(nodes.image)):
        file = app.env.images.get(image["uri"])
        if file is not None and not isinstance(image.parent, nodes.reference):
            uri = posixpath.relpath(posixpath.join("_images", file[1]), folder or ".")
            link = nodes.reference("", "", refuri=uri, internal=True, classes=["figure-link"])
            image.replace_self(link)
            link.append(image)
