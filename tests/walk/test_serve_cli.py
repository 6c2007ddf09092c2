"""`saccade serve` from the command line: errors before it starts."""

import subprocess
import sys

import pytest

from saccade.cli import main

pytest.importorskip("gradio", reason="the page needs the web extra: pip install 'saccade[web]'")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--port", "99999"], 2, "saccade serve: argument --port: expected an integer from 1 to 65535, got 99999."),
        (["--port", "0"], 2, "expected an integer from 1 to 65535, got 0."),
        (["--max-mb", "0"], 2, "argument --max-mb: expected a number above 0, got 0."),
        (["--max-mb", "nan"], 2, "argument --max-mb: expected a number above 0, got nan."),
        (["--port", "first"], 2, "argument --port: expected an integer from 1 to 65535, got first."),
        (["--model", "resnet50"], 2, "unknown model 'resnet50'"),
        (["--host", "unknown-host.invalid"], 1, "expected a free address of this machine, got unknown-host.invalid ("),
        (["--checkpoint", "gone"], 1, "no such checkpoint: gone"),
        (["--set", "a=1"], 2, "unrecognized arguments: --set a=1"),
        (["--out", "x"], 2, "unrecognized arguments: --out x"),
    ],
)
def test_serve_errors_are_one_line(capsys, words, code, message):
    try:
        result = main(["serve", *words, "--device", "cpu"])
    except SystemExit as stop:
        result = stop.code
    captured = capsys.readouterr()
    assert (result, captured.out) == (code, "")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_serve_help_imports_neither_torch_nor_gradio():
    code = (
        "import sys; sys.argv = ['saccade', 'serve', '--help']\n"
        "from saccade.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'gradio', 'matplotlib', 'PIL') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--checkpoint PATH" in out
    assert out.endswith("[]\n")


@pytest.mark.parametrize(("command", "flag"), [("bench svit_nano", "--seed 1"), ("demo", "--set a=1")])
def test_flags_without_use_are_refused(capsys, command, flag):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), *flag.split()])
    assert stop.value.code == 2
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err
