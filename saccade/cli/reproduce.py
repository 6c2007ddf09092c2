"""`saccade reproduce`: check the papers' claims with small training runs, or released weights on the papers' data."""

import argparse
import sys
from pathlib import Path
from typing import Any

from saccade._errors import UsageError
from saccade.cli import integer, number

HELP = "check the papers' claims: small paired training runs and a verdict per claim; released weights against print"
EXAMPLE = """saccade reproduce --list
         saccade reproduce vt-tokenizer --data tiny-imagenet/ --seeds 3 --jobs 6
         saccade reproduce --data tiny-imagenet/ camvid/ --jobs 8 --budget 10 --resume
         saccade reproduce svit-cpe --data scenes --set epochs=2 --set trainer.precision=32-true --out runs/try
         saccade reproduce paca-clusters --data imagenet/"""
FLAGS = ("out", "set", "device")  # of the shared ones
DEFAULT_OUT, DEFAULT_SEEDS = "runs/claims", 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="names or families (svit); default: all claims")
    parser.add_argument("--list", action="store_true", help="list the claims and what is measured")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="the folders tiny-imagenet, cifar10 or camvid, or scenes; with released weights the folder of ImageNet",
    )
    parser.add_argument("--seeds", type=integer(), metavar="N", help="runs per arm (default: 3)")
    parser.add_argument(
        "--jobs", type=integer(1, 1024), metavar="N", help="runs at a time (default: 4 on a GPU, 1 on a CPU)"
    )
    parser.add_argument(
        "--budget",
        type=number(0, exclusive=True),
        metavar="MIN",
        help="stop, with checkpoints, before MIN minutes are over",
    )
    parser.add_argument("--resume", action="store_true", help="continue the runs in --out")
    parser.add_argument(
        "--batch", type=integer(), metavar="N", help="images per batch with released weights (default: 64)"
    )
    parser.add_argument(
        "--limit", type=integer(), metavar="N", help="evaluate released weights on a balanced subset of N images"
    )


def needs_torch(args: argparse.Namespace) -> bool:
    return not args.list


def run(args: argparse.Namespace) -> int:
    from saccade._extras import require

    for module in ("yaml", "scipy"):
        require(module, "train")
    from saccade.reproduce.claim import load_released

    released = load_released()
    if args.list:
        return list_claims(args)
    chosen = [name for name in args.claims if name in released]
    if not chosen:
        return reproduce(args)
    if len(chosen) != len(args.claims):
        raise UsageError(f"{chosen[0]} evaluates released weights. Give it without claims that train.")
    return evaluate_weights(args, [released[name] for name in chosen])


def reproduce(args: argparse.Namespace) -> int:
    """Train what the claims need and print the verdicts."""
    from saccade._extras import require

    require("lightning.pytorch", "train")
    from saccade.cli import pick_device, print_json
    from saccade.reproduce.assess import assess
    from saccade.reproduce.claim import load_claims, select
    from saccade.reproduce.plan import locate_data, plan_runs
    from saccade.reproduce.runner import Runner

    refuse(args, "released weights", "batch", "limit")
    selected = select(args.claims, load_claims())
    claims, data = locate_data(selected, args.data, bool(args.claims))
    out, device = Path(args.out or DEFAULT_OUT), pick_device(args.device)
    if (out / "results").exists() and not args.resume:
        raise ValueError(f"{out} already contains runs. Continue them with --resume, or choose another --out.")
    for path in data.values():
        if path != "scenes" and not Path(path).exists():
            raise ValueError(f"no data at {path}. Give --data an existing folder, or scenes.")
    say = (lambda line: None) if args.json else lambda line: print(line, file=sys.stderr, flush=True)
    if left_out := [claim.name for claim in selected if claim not in claims]:
        say(f"without their data set: {', '.join(left_out)}")
    seeds = args.seeds or DEFAULT_SEEDS
    runs = plan_runs(claims, seeds, args.set, data)
    (out / "results").mkdir(parents=True, exist_ok=True)
    jobs = args.jobs or (4 if device.startswith("cuda") else 1)
    runner = Runner(out, data, device, jobs, args.budget, say)
    runner.execute(runs)
    assessments = [assess(claim, out, seeds, args.set, data) for claim in claims]
    remaining = sum(not (out / "results" / f"{run.key}.json").is_file() for run in runs)
    document = {
        "out": str(out),
        "runs": len(runs),
        "remaining": remaining,
        "failed": list(runner.failed.values()),
        "postponed": sorted(set(runner.waiting.values())),
        "claims": assessments,
    }
    files = write_page(out, assessments, args)
    if args.json:
        print_json(document)
    else:
        print_verdicts(document)
        print(f"wrote {', '.join(str(file) for file in files)}")
    return 1 if runner.failed or runner.interrupted else 0


def refuse(args: argparse.Namespace, other: str, *names: str) -> None:
    """Raise for flags that only the other kind of claim uses."""
    for name in names:
        if getattr(args, name) not in (None, []) and getattr(args, name) is not False:  # 0 was given
            raise UsageError(f"--{name} is for {other}. Remove it.")


def write_page(out: Path, assessments: list[dict[str, Any]], args: argparse.Namespace) -> list[Path]:
    """Write claims.md, its figure and claims.json into the folder of the runs."""
    from saccade._files import write_file, write_json
    from saccade.reports import to_png
    from saccade.reproduce.page import draw, markdown
    from saccade.reproduce.verdict import UNMEASURED

    changed = (
        f"Recipes changed by {' '.join(f'`{text}`' for text in args.set)}: not the claims' own recipes."
        if args.set
        else ""
    )
    page = "# Claims\n\n" + markdown(assessments, figure="claims.png", warning=changed)
    files = [write_file(out / "claims.md", page), write_json(out / "claims.json", assessments)]
    if any(entry["verdict"] != UNMEASURED for entry in assessments):
        files.append(write_file(out / "claims.png", to_png(draw(assessments))))
    return files


def print_verdicts(document: dict[str, Any]) -> None:
    from saccade.cli import print_table
    from saccade.reproduce.page import measured_text

    columns, rows = ("claim", "order", "paper", "ours", "verdict"), []
    for entry in document["claims"]:
        metrics = {label: arm["metrics"][entry["metric"]] for label, arm in entry["arms"].items()}
        printed = ", ".join(
            "–" if metric["printed"] is None else f"{metric['printed']:g}" for metric in metrics.values()
        )
        ours = ", ".join(measured_text(metric) for metric in metrics.values())
        orders = ", ".join(pair["order"] for pair in entry["pairs"])
        rows.append((entry["claim"], orders, printed, ours, entry["verdict"]))
    print_table(columns, rows, columns, columns, width=120)
    for line in document["failed"]:
        print(f"failed: {line}", file=sys.stderr)
    if document["remaining"]:
        postponed = f" ({'; '.join(document['postponed'])})" if document["postponed"] else ""
        print(f"{document['remaining']} of {document['runs']} runs remain{postponed}. Continue with --resume.")


def list_claims(args: argparse.Namespace) -> int:
    """Print the claims, with what is measured in --out."""
    from saccade.cli import print_json, print_table
    from saccade.reproduce.assess import assess
    from saccade.reproduce.claim import load_claims, load_released, select

    refuse(args, "runs, not for --list", "data", "budget", "jobs", "resume", "batch", "limit")
    out, released = Path(args.out or DEFAULT_OUT), load_released()
    names = [name for name in args.claims if name not in released]
    claims = select(names, load_claims()) if names or not args.claims else []
    assessments = [assess(claim, out, args.seeds or DEFAULT_SEEDS, args.set) for claim in claims]
    weights = [entry for name, entry in released.items() if not args.claims or name in args.claims]
    if args.json:
        print_json({"claims": assessments, "released": [entry._asdict() for entry in weights]})
        return 0
    columns = ("claim", "paper", "table", "data", "runs", "statement")
    rows = [
        (*(entry[key] for key in columns[:4]), f"{entry['runs']}/{entry['planned']}", entry["statement"])
        for entry in assessments
    ]
    rows += [(claim.name, claim.paper, claim.table, "imagenet", "–", claim.statement) for claim in weights]
    print_table(columns, rows, columns, ("statement",), width=120)
    return 0


def evaluate_weights(args: argparse.Namespace, claims: list[Any]) -> int:
    """Evaluate released weights and print paper against measured."""
    from saccade._extras import require

    require("torchmetrics", "train")
    import torch

    from saccade._files import write_json
    from saccade.cli import pick_device, print_json, progress_bar
    from saccade.engine.results import machine
    from saccade.reproduce.released import evaluate_released

    refuse(args, "claims that train", "set", "budget", "jobs", "resume", "seeds")
    if len(args.data) != 1:
        raise UsageError(f"{claims[0].name} needs one --data PATH of ImageNet, got {len(args.data)}.")
    if not Path(args.data[0]).exists():
        raise ValueError(f"no data at {args.data[0]}. Give --data the folder of ImageNet.")
    device, documents = pick_device(args.device), []
    with progress_bar("evaluating", args) as bar:
        report = (lambda name, done, total: bar(done, total)) if bar else None
        for claim in claims:
            document = evaluate_released(
                claim, args.data[0], device, args.batch or 64, limit=args.limit, on_progress=report
            )
            documents.append(document | {"machine": machine(torch.device(device))})
    if args.out:
        for document in documents:
            write_json(Path(args.out) / "released" / f"{document['claim']}.json", document)
    if args.json:
        print_json(documents)
        return 0
    for document in documents:
        print_released(document)
    return 0


def print_released(document: dict[str, Any]) -> None:
    from saccade.cli import print_table

    rows = document["rows"]
    title = f"{document['paper']} {document['table']}, top-1 on {rows[0]['count']} images of {document['data']}"
    cells = [
        (row["label"], row["weights"], f"{row['printed']:.2f}", f"{row['top1']:.2f}", f"{row['difference']:+.2f}")
        for row in rows
    ]
    columns = ("row", "weights", "paper", "measured", "difference")
    print_table(columns, cells, columns[:2], width=100, title=title)
