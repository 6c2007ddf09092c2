"""`saccade pull`: download the authors' released weights."""

import argparse
from typing import Any

from saccade._errors import UsageError

HELP = "download the authors' released weights, convert and cache them"
EXAMPLE = "saccade pull sparseformer_tiny paca_small+paca"
FLAGS = ()  # of the shared ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="model, or model and tag: paca_small.in1k_c49")
    parser.add_argument("--list", action="store_true", help="list the released files; with --all or NAMEs, only those")
    parser.add_argument("--all", action="store_true", help="all files that need no download by hand")
    parser.add_argument("--to", metavar="DIR", help="folder for the converted files (default: the cache)")
    parser.add_argument("--from", dest="source", metavar="FILE", help="convert this downloaded file; needs one NAME")


def needs_torch(args: argparse.Namespace) -> bool:
    return not args.list


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from saccade.cli import print_json
    from saccade.weights.releases import RELEASES, Release, find

    if args.source and args.list:
        raise UsageError("--from converts a file, --list lists the released ones. Leave one out.")
    releases: list[Release] = [release for release in RELEASES if args.all and (args.list or not release.by_hand)]
    for name in args.names:
        if (release := find(name)) is None:
            raise UsageError(f"expected a released model, got {name!r}. `saccade pull --list` lists them.")
        releases.append(release)
    folder = Path(args.to) if args.to else None
    if args.list or not releases:
        rows = [describe(release, folder) for release in releases or RELEASES]
        print_json(rows) if args.json else print_releases(rows)
        return 0
    if args.source and len(releases) != 1:
        raise UsageError(f"expected one NAME with --from, got {len(releases)}.")
    return pull(releases, folder, Path(args.source) if args.source else None, args.json)


def pull(releases: list[Any], folder: Any, source: Any, as_json: bool) -> int:
    """Fetch every release; a failure does not stop the others. 1 if one failed."""
    import sys

    from saccade.cli import print_json
    from saccade.tasks.load import check_format
    from saccade.tasks.released import fetch_release

    rows = []
    for release in releases:
        try:
            if source and source.is_file():
                check_format(source)
            path, error = str(fetch_release(release, folder, source)), None
        except (ValueError, RuntimeError, OSError) as failure:
            path, error = None, " ".join(str(failure).split())
        rows.append({"name": release.name, "path": path, "error": error})
        if path and not as_json:
            print(f"{release.name}: {path}")
        elif not as_json:
            print(f"saccade pull: {error}", file=sys.stderr)
    if as_json:
        print_json(rows)
    return 1 if any(row["error"] for row in rows) else 0


def describe(release: Any, folder: Any) -> dict[str, Any]:
    """One row of the list."""
    from saccade.weights.releases import cached_file

    path = cached_file(release, folder)
    return {
        "name": release.name,
        "source": release.url,
        "by_hand": release.by_hand,
        "licence": release.licence or None,
        "megabytes": release.megabytes,
        "accuracy": release.accuracy or None,
        "cached": str(path) if path.is_file() else None,
        "note": release.note or None,
    }


def print_releases(rows: list[dict[str, Any]]) -> None:
    from saccade.cli import print_table

    cells = []
    for row in rows:
        source = "Drive" if "drive.google.com" in row["source"] else "GitHub"
        accuracy = (row["accuracy"] or "–").replace(" box AP, ", "/").replace(" mask AP", " AP")
        values = (row["licence"] or "none", str(row["megabytes"]), accuracy)
        cells.append((row["name"], source, *values, "yes" if row["cached"] else ""))
    text = ("model", "source", "licence", "accuracy", "cached")
    caption = "MB of float32 weights; accuracy in the papers. Drive: download by hand, then --from FILE"
    print_table((*text[:3], "MB", *text[3:]), cells, text, padding=0, caption=caption)
