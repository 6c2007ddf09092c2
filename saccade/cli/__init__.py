"""The command line: one file per command.

A command file defines `HELP` (one line), `EXAMPLE` (a command that works), `FLAGS` (the shared flags it uses),
`add_arguments(parser)` and `run(args) -> int`. It imports torch and the rest of the package inside `run`: `saccade
--help` imports neither. A command that can do without torch also defines `needs_torch(args) -> bool`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

COMMANDS = (
    "models", "train", "eval", "predict", "explain", "bench", "export", "convert", "pull", "reproduce", "serve", "demo",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run `saccade …` and return the exit code: 0 done, 1 failed, 2 wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names that are not UTF-8
    args = make_parser().parse_args(argv)
    try:
        if args.needs_torch(args):
            import_module("saccade.models")  # registers the models with timm
        _check_out(getattr(args, "out", None))
        return args.entry(args)
    except KeyboardInterrupt:
        print(f"saccade {args.command}: stopped", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError, ImportError, TypeError) as error:
        unknown_option = "unexpected keyword argument" in str(error) and getattr(args, "set", None)  # of a model
        if os.environ.get("SACCADE_DEBUG") or (isinstance(error, TypeError) and not unknown_option):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, TypeError):
            message = message.rstrip(".") + ". Correct or remove it in --set."
        elif isinstance(error, OSError) and error.filename is not None and error.strerror:
            message = f"{error.filename}: {error.strerror}. Check the path, its permissions and the free space."
        print(f"saccade {args.command}: {message}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
    return parser


SHARED_FLAGS: dict[str, dict[str, Any]] = {
    "out": {"metavar": "DIR", "help": "output folder"},
    "set": {
        "metavar": "KEY=VALUE",
        "action": "append",
        "default": [],
        "help": "override a setting; may be repeated",
    },
    "device": {"default": "auto", "help": "cpu, cuda, cuda:1, …; auto: a GPU if there is one"},
    "seed": {"type": int, "default": 0, "help": "random seed (default: 0)"},
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


def _check_out(out: str | None) -> None:
    """Raise, before the work is done, if the folder or file of --out cannot be created."""
    if out is None:
        return
    path = Path(out)
    folder = path if not path.suffix or path.is_dir() else path.parent
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
    try:
        return str(torch.device(name))
    except RuntimeError:
        raise ValueError(f"expected cpu, cuda or cuda:N for --device, got {name}.") from None


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Return --set a=1 --set b='(2, 3)' as keyword arguments; values are Python literals or, failing that, strings."""
    from ast import literal_eval

    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"expected --set KEY=VALUE, got --set {pair}.")
        try:
            options[key] = literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options


def check_numbers(args: argparse.Namespace, **least: float) -> None:
    """Raise ValueError for a flag, or one of its values, that is below its least value."""
    for name, minimum in least.items():
        value = getattr(args, name)
        values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if values and not min(values) >= minimum:
            raise ValueError(f"expected --{name.replace('_', '-')} of at least {minimum}, got {min(values)}.")


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
