"""`saccade serve`: the page, on this machine."""

import argparse

HELP = "open a web page: drop a picture, see answers and tokens, click on a token; also an HTTP API"
EXAMPLE = "saccade serve --checkpoint runs/first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="PATH",
        help="offer your own model: a file of weights or a run's folder, classifier or segmenter; may be repeated",
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="offer these models only; may be repeated"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, help="port (default: 7860, or the next that is free)")
    parser.add_argument("--max-mb", type=float, default=10, help="largest upload in megabytes (default: 10)")
    parser.add_argument("--max-megapixels", type=float, default=40, help="largest picture (default: 40)")
    parser.add_argument("--waiting", type=int, default=64, help="requests that may wait in the queue (default: 64)")
    parser.add_argument("--open", action="store_true", help="open the browser")


def run(args: argparse.Namespace) -> int:
    import signal
    import sys

    from saccade._extras import require
    from saccade.cli import pick_device, print_json

    require("gradio", "web")
    from saccade.web.catalogue import Catalogue
    from saccade.web.server import start
    from saccade.web.service import Service
    from saccade.web.uploads import Limits

    for name in ("max_mb", "max_megapixels", "waiting"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected more than 0")
    catalogue = Catalogue(args.checkpoint, args.model, pick_device(args.device), args.seed)
    service = Service(catalogue, Limits(args.max_mb, args.max_megapixels))
    running = start(service, args.host, args.port, args.waiting, args.open)
    offered = {task: catalogue.names(task) for task in ("classification", "segmentation")}
    if args.json:
        print_json({"url": running.url, "models": offered})
    else:
        print(f"models: {', '.join(catalogue.offers)}")
        fresh = [offer.name for offer in catalogue.offers.values() if not offer.trained]
        if fresh:
            print(f"with fresh weights, whose answers mean nothing: {', '.join(fresh)}")
        print(f"open {running.url} (Ctrl-C stops it)", flush=True)
    if args.host not in ("127.0.0.1", "localhost", "::1"):
        print("saccade serve: everyone who reaches this address can use the page; it asks no password", file=sys.stderr)
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that uploads are deleted then, too
    try:
        running.page.block_thread()  # type: ignore[attr-defined]
    finally:
        running.close()
    return 0
