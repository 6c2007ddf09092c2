"""tools/check_language.py flags every word of the vocabulary table, and not its legitimate uses."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/check_language.py"


def load():
    spec = spec_from_file_location("check_language", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["check_language"] = module  # dataclasses look up the module of a class
    spec.loader.exec_module(module)
    return module


tool = load()

NAMES = {
    "twin": ("group_twin", "GroupTwin", "twins"),
    "way back": ("way_back", "there_and_back"),
    "learns": ("learns_weight", "Learning", "LEARNER"),
    "answer": ("answer", "answers_of", "AnswerMap"),
    "heard": ("heard", "is_heard", "listens", "Listener"),
    "nobody": ("NOBODY", "somebody_reads"),
    "ask": ("ask_pixels", "tokens_asked"),
    "look": ("look_at", "Look", "looking", "lookAt"),
    "road": ("short_road",),
    "kept": ("kept", "in_form", "never_change"),
    "forget": ("forget", "forgotten_norm"),
    "held": ("held", "rows_held", "known"),
    "recorded": ("recorded", "Recording"),
    "compilers": ("compilers", "COMPILER"),
    "picture": ("picture_input", "Pictures"),
    "dice": ("dice", "throw", "Thrown"),
    "stands": ("stands", "norm_behind"),
    "suits": ("suits", "fits_kernel", "takes_clips"),
    "fresh": ("fresh", "fresh_weights"),
    "halved": ("halved", "halves"),
    "whole": ("whole", "at_once", "together"),
    "shares": ("shares", "share", "class_shares"),
    "by turns": ("by_turns",),
    "trunk": ("trunk", "TrunkStage"),
    "worth": ("worth",),
    "opinion": ("second_opinion",),
    "owes": ("owes", "validation_owed"),
    "mend": ("mend", "mended"),
    "dearer": ("dearer",),
    "ghost": ("ghost",),
    "crank": ("crank",),
    "house": ("house", "room_of"),
    "door": ("front_door",),
    "vague name": ("there", "here", "away", "about", "rest", "others", "seen", "found", "made", "numbers"),
}
PROSE = {
    "twin": ("the kernel's twin", "Twins of the ops"),
    "way back": ("on the way back", "there and back", "the gradient goes back"),
    "learns": ("a norm that learns", "the layer learns its scale"),
    "answer": ("a copy that only answers", "the model's answer"),
    "heard": ("a layer that is heard", "nobody listens", "listening to a layer"),
    "nobody": ("whether somebody reads it", "nobody needs it", "someone else's run"),
    "ask": ("tokens ask pixels", "every pixel asks a few clusters", "instead of asking all"),
    "look": ("where a token looks", "look at the image", "looking twice"),
    "road": ("the short road", "takes this road", "Triton's own road"),
    "kept": ("what is kept for backward", "the weights in form"),
    "forget": ("forgotten and computed again", "forget the last one"),
    "held": ("few registers are held",),
    "recorded": ("launches are recorded", "a recording of the step"),
    "the library": ("done by the library", "the library's kernel"),
    "compilers": ("compilers may take it", "under a compiler"),
    "picture": ("one picture", "Pictures in a batch"),
    "dice": ("throw the dice", "the dice continue"),
    "figures": ("the papers' figures", "printed figures"),
    "stands": ("what stands behind the norm", "before or behind", "in front of it"),
    "suits": ("fused where that suits",),
    "fresh": ("fresh weights", "a fresh model"),
    "halved": ("weights in halves", "halved weights"),
    "whole": ("all images at once", "written whole or not at all"),
    "shares": ("every row in shares of its class", "their share is lost"),
    "by turns": ("timed by turns", "cases take turns"),
    "trunk": ("the trunk is a ResNet", "the body of the network"),
    "update": ("after 176 updates", "every update", "the state is saved"),
    "worth": ("what a model is worth",),
    "opinion": ("a second opinion",),
    "owes": ("a validation is owed",),
    "mend": ("mend the file", "mended since"),
    "dearer": ("occlusion is dearer",),
    "ghost": ("a ghost of the module",),
    "crank": ("turns the crank",),
    "house": ("the rooms of the house", "no room above"),
    "door": ("cast at the door",),
    "a for per": (
        "4000 images a second",
        "one token a cell",
        "3 ms an image",
        "once a token",
    ),
}
LEGITIMATE_NAMES = [
    "state_dict",
    "update",
    "learning_rate",
    "learned_filters",
    "lookup",
    "look_up",
    "lookahead",
    "mask",
    "task",
    "dice_loss",
    "keepdim",
    "keep",
    "record",
    "traces",
    "figure",
    "figures",
    "share_weights",
    "rest_api",
    "num_classes",
    "known_classes",
    "roadmap",
    "outputs",
    "broadcast",
    "twine",
    "doorway",
    "stand",
    "background",
]
LEGITIMATE_PROSE = """
    the held-out images, held out from training
    looked up by name, look up the key
    this looks like channels-last
    the forward pass and the backward pass
    the kernel fits in shared memory and takes a tensor
    found by tracing the whole image, the rest of the axes
    Dice loss of the masks
    update the EMA and the optimizer state
    figures of the report
    a second model, in a second step
    road 86 %, sky 91 %
    filters learned by the model
    `look_at` was renamed
    the former "picture" argument
    see docs/figures/serve.jpg and tests/twin.py
    [the table](docs/figures.md)
""".strip().splitlines()


def test_every_rule_has_examples():
    assert NAMES.keys() == tool.NAME_RULES.keys()
    assert PROSE.keys() == tool.PROSE_RULES.keys()
    assert NAMES.keys() | PROSE.keys() == tool.RULES.keys()


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule, names in NAMES.items() for name in names])
def test_name_is_flagged(rule, name):
    assert rule in [match for match, _ in tool.check_name(name)]


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule, texts in PROSE.items() for text in texts])
def test_prose_is_flagged(rule, text):
    assert rule in [match for match, _ in tool.check_prose(text)]


@pytest.mark.parametrize("name", LEGITIMATE_NAMES)
def test_legitimate_name_is_not_flagged(name):
    assert tool.check_name(name) == []


@pytest.mark.parametrize("text", LEGITIMATE_PROSE)
def test_legitimate_prose_is_not_flagged(text):
    assert tool.check_prose(text) == []


def plant(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return [(finding.line, finding.rule, finding.kind) for finding in tool.check_file(file, root)]


def test_python_file_is_checked_in_names_comments_docstrings_and_messages(tmp_path):
    source = '''"""Modules.

A layer that nobody needs.
"""
import numbers
from torch import ops as twin


class Look:
    held: int = 3  # the way back

    def forward(self, picture):
        self.trunk = picture
        raise ValueError(f"expected one picture, got {picture}")
'''
    findings = plant(tmp_path, "saccade/web/door.py", source)
    assert sorted(findings) == [
        (1, "door", "name"),
        (3, "nobody", "prose"),
        (6, "twin", "name"),
        (9, "look", "name"),
        (10, "held", "name"),
        (10, "way back", "prose"),
        (12, "picture", "name"),
        (13, "trunk", "name"),
        (14, "picture", "prose"),
    ]
    planted = plant(tmp_path, "tests/test_web.py", 'def test_x():\n    assert "one picture" == f"two pictures {1}"\n')
    assert planted == []  # test data may contain anything


def test_markdown_is_checked_outside_code(tmp_path):
    text = "# Pictures\n\n`picture`\n\n```\npicture\n```\n\n    picture\n\nClasses: picture frame.\n"
    assert plant(tmp_path, "docs/a.md", text) == [(1, "picture", "prose")]


def test_yaml_is_checked_in_comments(tmp_path):
    text = "# 8 GPUs, 300 epochs of pictures\nmodel: picture  # the trunk\n"
    assert plant(tmp_path, "recipes/a.yaml", text) == [(1, "picture", "prose"), (2, "trunk", "prose")]


def test_allowlist_needs_glob_and_line_and_reports_unused_entries(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("one picture\nanother picture here\n")
    used = tool.Allowed("docs/*.md", "another picture", "why")
    unused = tool.Allowed("docs/b.md", "one picture", "why")
    findings, stale = tool.check([tmp_path / "docs/a.md"], [used, unused], tmp_path)
    assert [finding.line for finding in findings] == [1]
    assert stale == [unused]


def test_allowlist_is_short_and_has_reasons(tmp_path):
    allowed = tool.read_allowlist()
    assert all(entry.reason for entry in allowed)
    long = tmp_path / "long.txt"
    long.write_text("a | b | c\n" * 26)
    with pytest.raises(ValueError, match=r"expected at most 25 lines in long\.txt, got 26"):
        tool.read_allowlist(long)


def test_command_returns_0_for_clean_files():
    clean = subprocess.run([sys.executable, SCRIPT, SCRIPT], capture_output=True, text=True)
    assert (clean.returncode, clean.stdout) == (0, "1 files checked\n")
    done = subprocess.run([sys.executable, SCRIPT, "--json", Path(__file__)], capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert (done.returncode, document["findings"], document["unused"]) == (0, [], [])


def test_command_returns_1_for_findings(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("a picture\n")
    monkeypatch.setattr(tool.check, "__defaults__", (tmp_path,))
    assert tool.main([str(tmp_path / "a.md")]) == 1
    assert "a.md:1: prose 'picture' (picture): write image; figure for what we draw" in capsys.readouterr().out
