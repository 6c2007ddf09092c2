"""Pages with the source of the package, and links to the lines that compute the equations of the papers.

A link of a page to a file of the repository (`../saccade/tokens/projector.py`) becomes a link to a page with that file.
Every "VT Eq. 5" of a page becomes a link to the line that computes the equation, found by `tools/make_equations.py`
when the site is built: it cannot be out of date.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.make_equations import EQUATIONS, find_places

CITATION = re.compile(r"\b(VT|SViT|PaCa|SparseFormer) (Eqs?\. )(\d+(?:(?:-|, | and |, and )\d+)*)")
REPOSITORY = "https://github.com/saccade-vision/saccade"
NOT_LINKED = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title)
SUFFIXES = {".py", ".yaml", ".sh", ".toml", ".txt", ".json", ".cff", ".md", ".css", ""}


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", link_files, priority=400)  # before Sphinx copies the files for download
    app.connect("doctree-read", link_equations)
    app.connect("html-collect-pages", source_pages)
    app.connect("env-purge-doc", drop_page)
    app.connect("env-merge-info", merge)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}


def linked_files(env: Any) -> dict[str, set[str]]:
    """Page -> files of the repository that it links to."""
    if not hasattr(env, "saccade_linked_files"):
        env.saccade_linked_files = {}
    return env.saccade_linked_files


def drop_page(app: Sphinx, env: Any, docname: str) -> None:
    linked_files(env).pop(docname, None)


def merge(app: Sphinx, env: Any, docnames: Any, other: Any) -> None:
    linked_files(env).update({name: files for name, files in linked_files(other).items() if name in docnames})


def link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Replace links to files and folders of the repository by links to their pages."""
    page = app.env.docname
    for node in [*doctree.findall(download_reference), *doctree.findall(pending_xref)]:
        path = Path(os.path.normpath(Path(app.env.doc2path(page)).parent / file_of(node, app)))
        if not path.is_relative_to(ROOT) or path.is_relative_to(app.srcdir):
            continue
        file = path.relative_to(ROOT).as_posix()
        if path.is_file() and path.suffix in SUFFIXES:
            node.replace_self(reference(app, page, file, "", node.children, {"source"}))
        elif path.is_dir():
            node.replace_self(nodes.reference("", "", *node.children, refuri=f"{REPOSITORY}/tree/main/{file}"))


def file_of(node: nodes.Element, app: Sphinx) -> str:
    """The path that a link names; MyST gives that of another Markdown file relative to docs/ and without its suffix."""
    target = node.get("reftarget", "").partition("#")[0]
    if isinstance(node, pending_xref) and node.get("refdomain") == "doc":
        return str(Path(app.srcdir) / f"{target}.md")
    return target or "."


def link_equations(app: Sphinx, doctree: nodes.document) -> None:
    """Link every citation outside code and other links to the first line that computes the equation."""
    page = app.env.docname
    for text in list(doctree.findall(nodes.Text)):
        if any(
            isinstance(parent, (nodes.reference, nodes.literal, nodes.literal_block, nodes.title))
            for parent in parents(text)
        ):
            continue
        pieces = list(split_citations(app, page, str(text)))
        if any(isinstance(piece, nodes.reference) for piece in pieces):
            text.parent.replace(text, pieces)


def split_citations(app: Sphinx, page: str, text: str) -> Iterator[nodes.Node]:
    position = 0
    for match in CITATION.finditer(text):
        yield nodes.Text(text[position : match.start()])
        paper, name, ordinals = match.groups()
        single = ordinals.isdigit()
        if not single:
            yield nodes.Text(f"{paper} {name}")
        for part in re.split(r"(\d+)", ordinals):
            equation = f"{paper} Eq. {part}"
            label = nodes.Text(equation if single else part)
            if part.isdigit() and equation in EQUATIONS:
                place = find_places()[equation][0]
                title = f"{equation}: {place.function}, saccade/{place.file}, line {place.line}"
                yield reference(app, page, f"saccade/{place.file}", f"#L-{place.line}", [label], {"equation"}, title)
            elif part:
                yield label
        position = match.end()
    yield nodes.Text(text[position:])


def parents(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def reference(
    app: Sphinx, page: str, file: str, anchor: str, children: Any, classes: set[str], title: str = ""
) -> nodes.reference:
    linked_files(app.env).setdefault(page, set()).add(file)
    uri = app.builder.get_relative_uri(page, f"source/{file}") if app.builder.format == "html" else file
    node = nodes.reference("", "", *children, internal=True, refuri=uri + anchor, classes=sorted(classes))
    if title:
        node["reftitle"] = title
    return node


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page per linked file, with an anchor on every line."""
    cited = {f"saccade/{place.file}" for places in find_places().values() for place in places}
    files = set().union(*linked_files(app.env).values(), cited)
    formatter = HtmlFormatter(linenos="inline", linespans="L", wrapcode=True)
    for file in sorted(files):
        try:
            lexer = get_lexer_for_filename(file)
        except ClassNotFound:
            lexer = TextLexer()
        code = highlight((ROOT / file).read_text(), lexer, formatter)
        body = f'<h1><code>{file}</code></h1>\n<div class="source-page">{code}</div>'
        yield f"source/{file}", {"title": file, "body": body, "parents": []}, "page.html"
