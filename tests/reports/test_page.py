"""The template of all pages, its parts and the stylesheet."""

import re

import jinja2
import pytest

from saccade.reports.page import STYLE, Thumbnail, environment, part, render

SCORES = {"model": "<b>", "images": 2, "data": "set", "weights": "w", "skipped": {"a<i>.png": "damaged"}}


def test_pages_extend_one_base():
    names = [name for name in environment().list_templates() if name not in ("base.html", "parts.html")]
    assert sorted(names) == ["benchmark.html", "demo.html", "explanation.html", "scores.html", "training.html"]
    for name in names:
        source = environment().loader.get_source(environment(), name)[0]
        assert source.startswith('{% extends "base.html" %}')
        assert "<style" not in source
        assert "|safe" not in source


def test_values_are_escaped():
    text = render("scores.html", scores=SCORES, chart="", tables=[("<u>", "note", ("x",), [("<s>",)], ())])
    assert "<title>Token scores of &lt;b&gt;</title>" in text
    assert "<h1>Token scores of &lt;b&gt;</h1>" in text
    assert "a&lt;i&gt;.png: damaged" in text
    assert not re.search("<[bius]>", text)


def test_fragment_has_the_stylesheet_and_no_document():
    text = render("scores.html", fragment=True, scores=SCORES, chart="", tables=[])
    assert text.startswith("\n<style>") or text.startswith("<style>")
    assert "<html" not in text
    assert "<main>" in text


def test_undefined_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        render("scores.html", scores=SCORES, tables=[])


def test_names_that_are_not_utf8_are_replaced():
    name = b"caf\xe9.png".decode(errors="surrogateescape")
    text = render("scores.html", scores=SCORES | {"skipped": {name: "damaged"}}, chart="", tables=[])
    assert "caf?.png: damaged" in text
    text.encode()


def test_table_aligns_numbers():
    html = part("table", ("name", "value"), [("a", "1")], (1,))
    assert '<th>name</th><th class="number">value</th>' in html
    assert '<td>a</td><td class="number">1</td>' in html


def test_bars_show_fraction_value_and_colour():
    html = part("bars", [("cat", 0.5), ("dog", 0.25, "one quarter"), ("sky", 0.1, "10 %", "#abcdef")])
    assert re.findall(r"--width: ([\d.]+)%", html) == ["50.00", "25.00", "10.00"]
    assert re.findall(r'class="value">(.*?)<', html) == ["50.0%", "one quarter", "10 %"]
    assert html.count("background: #abcdef") == 2


def test_panel_has_a_line_per_note_and_its_file_name():
    html = part("panel", Thumbnail("data:,", "cat", "one\ntwo", (1, 2, 3), True, "<cat>.png"))
    assert html.count("<small>") == 2
    assert 'title="&lt;cat&gt;.png"' in html
    assert "rgb(1, 2, 3)" in html
    assert 'class="sharp"' in html


def test_stylesheet_has_light_dark_phone_and_print():
    for query in ("prefers-color-scheme: dark", "max-width: 720px", "@media print"):
        assert query in STYLE
    assert "http" not in STYLE
    report = STYLE[: STYLE.index("/* The Gradio page")]
    assert set(re.findall(r"var\((--[\w-]+)", report)) - set(re.findall(r"(--[\w-]+):", report)) == {
        "--width", "--columns", "--side"
    }  # fmt: skip
