"""The command line: one command, one file, each parse -> call -> print.

A command file offers `HELP` (one line), `EXAMPLE` (a command that works), `add_arguments(parser)` and
`run(args) -> int`. It imports what it needs inside `run`, so that `saccade --help` stays quick.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS = (
    "models",
    "train",
    "eval",
    "predict",
    "explain",
    "bench",
    "export",
    "convert",
    "reproduce",
    "serve",
    "demo",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `saccade …`; gives the exit code: 0 done, 1 failed, 2 wrong usage."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return args.entry(args)
    except KeyboardInterrupt:
        print(f"saccade {args.command}: stopped", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if os.environ.get("SACCADE_DEBUG"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"saccade {args.command}: {message}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="saccade", description="Vision models that look at a few tokens.", epilog="saccade COMMAND --help"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    here = Path(__file__).parent
    for name in COMMANDS:
        if not (here / f"{name}.py").exists():
            continue
        module = import_module(f"saccade.cli.{name}")
        example = getattr(module, "EXAMPLE", "")
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"example: {example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        add_shared_flags(sub)
        sub.set_defaults(entry=module.run)
    return parser


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """What every command understands, unless it defines the flag itself."""
    taken = parser._option_string_actions
    if "--out" not in taken:
        parser.add_argument("--out", metavar="DIR", help="folder for what the command writes")
    if "--set" not in taken:
        parser.add_argument(
            "--set", metavar="KEY=VALUE", action="append", default=[], help="change a setting; may be repeated"
        )
    if "--device" not in taken:
        parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, …; auto takes a GPU when there is one")
    if "--seed" not in taken:
        parser.add_argument("--seed", type=int, default=0, help="seed of every random number")
    if "--json" not in taken:
        parser.add_argument("--json", action="store_true", help="print JSON for machines, and nothing else")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import saccade

        print(saccade.__version__)
        parser.exit()


def pick_device(name: str) -> str:
    """ "auto" to a device that is there; a named one that is not is an error."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no CUDA GPU that torch can use. Use --device cpu.")
    return str(torch.device(name))


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """--set a=1 --set b='(2, 3)' as keyword arguments; values are Python literals, or else text."""
    from ast import literal_eval

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {pair!r}: expected KEY=VALUE")
        try:
            found[key] = literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, default=str))
