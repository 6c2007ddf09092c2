"""Every code block of README.md and docs/ runs, with Sybil: Python as it is, `saccade` commands with smaller limits."""

import shlex
from unittest.mock import patch

import pytest

from saccade.cli import make_parser
from saccade.tokens import TOKENIZERS
from tests.walk.doc_pages import (
    LANGUAGES,
    NOT_EXECUTED,
    NOT_RUN,
    PAGES,
    ROOT,
    blocks,
    commands,
    is_listed,
    namespace_of,
    no_downloads,
    parse_page,
    with_limits,
    write_checkpoints,
    write_material,
)
from tests.weights.folder import SHIPPED, weights_in

# Pages that train, export, segment or serve.
SLOW = {"README", "deploy", "detection", "explain", "five_minutes", "segmentation", "serve", "sparseformer", "speed",
        "training", "video", "weights", "scale"}  # fmt: skip
# Python blocks that do not run here: words of them -> why.
SKIPPED = {
    ".cuda()": "needs a GPU",
    "torch.bfloat16, memory_format=": "needs a GPU",
    "@register_op(": "shows how an operation of the package is registered",
}


def name_of(page) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/").removesuffix(".md")


WITH_CODE = [page for page in PAGES if {"python", "bash"} & {language for language, _ in blocks(page)}]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def workplace(material, tmp_path, monkeypatch):
    """A folder with the material, as the working directory."""
    for path in material.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return tmp_path


@pytest.fixture
def server():
    """Address of a running `saccade serve`."""
    pytest.importorskip("gradio")
    from saccade.web.catalogue import Catalogue
    from saccade.web.server import start
    from saccade.web.service import Service

    page = start(Service(Catalogue([], ["svit_nano"])))
    yield page.url.removeprefix("http://").rstrip("/")
    page.close()


def test_pages_with_code_are_found():
    names = {name_of(page) for page in WITH_CODE}
    assert {"README", "index", "five_minutes", "extending", "vt", "svit", "paca", "sparseformer", "video"} <= names
    assert names >= SLOW


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fenced_blocks_name_a_known_language(page):
    assert {language for language, _ in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_shell_blocks_parse(page):
    """Every command is one of saccade that its parser accepts, or in a list with a reason."""
    for language, code in blocks(page):
        for command in commands(code) if language == "bash" else ():
            words = shlex.split(command, comments=True)
            if words and words[0] == "saccade":
                make_parser().parse_args(with_limits(words[1:]))
            elif words and words[0] not in ("curl", "python"):
                assert is_listed(command, NOT_RUN), command


def test_commands_that_are_not_run_have_reasons():
    assert all(NOT_RUN.values())
    assert all(NOT_EXECUTED.values())
    assert all(SKIPPED.values())


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if name_of(page) in SLOW else []) for page in WITH_CODE],
    ids=name_of,
)
def test_code_blocks_run(page, workplace, request):
    """In the order of the page, in one namespace and one folder."""
    address = "127.0.0.1:7860"
    served = request.getfixturevalue("server") if address in page.read_text() else address
    with weights_in(SHIPPED), no_downloads(), patch.dict(TOKENIZERS):
        write_checkpoints(page, workplace)
        document = parse_page(page, address, served)
        document.namespace.update(namespace_of(page))
        examples = list(document.examples())
        assert examples
        for example in examples:
            if not any(words in str(example.parsed) for words in SKIPPED):
                example.evaluate()
