"""The command line: one file per command.

A command file defines `HELP` (one line), `EXAMPLE` (a command that works), `FLAGS` (the shared flags it uses),
`add_arguments(parser)` and `run(args) -> int`. It imports torch and the rest of the package inside `run`: `saccade
--help` imports neither. A command that can do without torch also defines `needs_torch(args) -> bool`.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from saccade._errors import UsageError, model_options

COMMANDS = (
    "models", "train", "eval", "predict", "explain", "bench", "export", "convert", "pull", "reproduce", "serve", "demo",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run `saccade …` and return the exit code: 0 done, 1 failed, 2 wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names that are not UTF-8
    parser = make_parser()
    if "" in (sys.argv[1:] if argv is None else argv):
        parser.error("expected no empty arguments, got one. Is a variable of the shell unset?")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # names the command and its help
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # retries without a network: the error follows
    try:
        if args.needs_torch(args):
            import_module("saccade.models")  # registers the models with timm
        _check_out(getattr(args, "out", None), args.makes_folder)
        return args.entry(args)
    except KeyboardInterrupt:
        print(f"saccade {args.command}: stopped", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        if os.environ.get("SACCADE_DEBUG"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            message = f"{error.filename}: {error.strerror}. Check the path, its permissions and the free space."
        print(f"saccade {args.command}: {message}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.split())
        text += "" if text.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {text} `{self.prog} --help` lists the options.\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="saccade",
        description="Token-based vision models: training, evaluation, prediction, explanation.",
        epilog="saccade COMMAND --help prints the options of a command and an example.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"saccade.cli.{name}")
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        add_shared_flags(sub, module.FLAGS)
        sub.set_defaults(entry=module.run, needs_torch=getattr(module, "needs_torch", lambda args: True))
        sub.set_defaults(makes_folder="out" in module.FLAGS, parser=sub)
    return parser


MAX_INTEGER = 2**31 - 1  # of counts
MAX_SIDE = 16_384  # of images: a float32 image of 3 GB


def integer(least: int = 1, most: int = MAX_INTEGER) -> Callable[[str], int]:
    """The type of a flag: an integer from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            bounds = f"of at least {least}" if most == MAX_INTEGER and value < least else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected an integer {bounds}, got {text}")
        return value

    return parse


def number(least: float, most: float = math.inf, *, exclusive: bool = False) -> Callable[[str], float]:
    """The type of a flag: a finite number from `least` to `most`; `exclusive`: above `least`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and math.isfinite(value)) or (exclusive and value == least):
            bounds = f"above {least:g}" if exclusive else f"of at least {least:g}"
            bounds = bounds if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {text}")
        return value

    return parse


def device_name(text: str) -> str:
    """The type of --device."""
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text}")
    return text


SHARED_FLAGS: dict[str, dict[str, Any]] = {
    "out": {"metavar": "DIR", "help": "output folder"},
    "set": {
        "metavar": "KEY=VALUE",
        "action": "append",
        "default": [],
        "help": "override a setting; may be repeated",
    },
    "device": {"type": device_name, "default": "auto", "help": "cpu, cuda, cuda:1, …; auto: a GPU if there is one"},
    "seed": {"type": integer(0, 2**63 - 1), "default": 0, "help": "random seed (default: 0)"},
}


def add_shared_flags(parser: argparse.ArgumentParser, flags: Sequence[str]) -> None:
    """Add the shared flags that a command uses, and --json; others are refused by the parser."""
    for name in flags:
        parser.add_argument(f"--{name}", **SHARED_FLAGS[name])
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def add_renamed_flag(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Make the former spelling of a flag an error that names the present one."""
    parser.add_argument(old, action=_Renamed, nargs="*", const=new, help=argparse.SUPPRESS)


class _Renamed(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]} was renamed to {self.const}.")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import saccade

        print(saccade.__version__)
        parser.exit()


def _check_out(out: str | None, is_folder: bool) -> None:
    """Raise, before the work is done, if the folder or file of --out cannot be created."""
    if out is None:
        return
    path = Path(out)
    folder = path if is_folder else path.parent
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise ValueError(f"expected a folder for --out {out}, got the file {existing}. Choose another --out.")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"expected a folder to write to for --out {out}, got {existing}. Choose another --out.")


def pick_device(name: str) -> str:
    """Return a device name that torch accepts; "auto" is a GPU if there is one, else the CPU."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"expected an available device, got --device {name}: torch finds no CUDA GPU. Use --device cpu."
        )
    kind, _, index = name.partition(":")
    if kind != "cpu" and not getattr(torch.backends if kind == "mps" else torch, kind).is_available():
        raise ValueError(f"expected an available device, got --device {name}. Use --device cpu.")
    if index and int(index) >= (count := getattr(torch, kind).device_count()):
        raise ValueError(f"expected a device below {kind}:{count}, got --device {name}. Choose another.")
    return name


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Return --set a=1 --set b='(2, 3)' as keyword arguments; values are Python literals or, failing that, strings."""
    from ast import literal_eval

    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"expected --set KEY=VALUE, got --set {pair}.")
        try:
            options[key] = literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # "{[]: 1}", nested too deeply
            options[key] = value
    return options


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Raise UsageError for an unknown model, or for options of --set that it cannot be created with."""
    import torch

    from saccade import create_model

    with torch.device("meta"), model_options(name, options):
        create_model(name, **options)


def check_source(name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise UsageError for a word that is neither a path, nor the name of weights, nor of a model.

    With a separator or a suffix it is a path, and that a file is missing is no wrong usage.
    """
    import timm

    from saccade import list_models, weights
    from saccade.tasks.detection import REGION_HEADS
    from saccade.weights import releases

    if Path(name).exists() or Path(name).name != name or ":" in name or weights.find(name) or releases.find(name):
        return
    backbone, plus, head = name.partition("+")
    model = backbone.partition(".")[0]
    if not timm.is_model(model):
        if "." in name:
            return
        close = get_close_matches(model, list_models(), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "`saccade models` lists the models."
        raise UsageError(f"unknown model {name!r}, and no file or folder has this name. {hint}")
    if plus and head not in REGION_HEADS:
        raise UsageError(f"no weights {name!r} exist, and no file or folder has this name. See `saccade pull --list`.")
    if options and not plus:
        check_model(name, options)


@contextmanager
def spinner(text: str, args: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr and yield the function that changes its text; with --json show nothing."""
    if args.json:
        yield lambda message: None
        return
    from saccade._extras import require

    with require("rich.console", "train").Console(stderr=True).status(text) as status:
        yield status.update


@contextmanager
def progress_bar(title: str, args: argparse.Namespace) -> Iterator[Callable[[int, int], None] | None]:
    """A bar with the time left on a terminal: a function of the number done and the total, or None without one."""
    if args.json or not sys.stderr.isatty():
        yield None
        return
    from saccade._extras import require

    progress = require("rich.progress", "train")
    console = require("rich.console", "train").Console(stderr=True)
    columns = ("[progress.description]{task.description}", progress.BarColumn(), progress.MofNCompleteColumn())
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    text: Collection[str] = (),
    wrapped: Collection[str] = (),
    width: int = 0,
    **options: Any,
) -> None:
    """Print a table: columns in `text` aligned to the left, others, of numbers, to the right; None for a rule.

    Cells stay in one line except in `wrapped` columns. `width` is the least number of characters, also in a narrower
    terminal; `options` are those of rich's Table.
    """
    from saccade._extras import require

    console = require("rich.console", "train").Console()
    options = {"box": require("rich.box", "train").SIMPLE_HEAD, "padding": (0, 1, 0, 0)} | options
    table = require("rich.table", "train").Table(**options)
    for column in columns:
        justify = "left" if column in text else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in wrapped)
    for row in rows:
        table.add_section() if row is None else table.add_row(*row)
    console.width = max(width, console.width)
    console.print(table)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, default=str))
