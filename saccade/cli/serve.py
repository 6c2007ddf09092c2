"""`saccade serve`: the web page and HTTP API."""

import argparse

from saccade.cli import integer, number

HELP = "start a web page and HTTP API: upload an image, see predictions and tokens"
EXAMPLE = "saccade serve --checkpoint runs/first"
FLAGS = ("device", "seed")  # of the shared ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from saccade.cli import add_renamed_flag

    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="PATH",
        help="add a model: a checkpoint file or run folder, of any task; may be repeated",
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="offer only these models; may be repeated"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind to (default: 127.0.0.1, not reachable from the network)"
    )
    parser.add_argument("--port", type=integer(1, 65535), help="port (default: 7860, or the next free one)")
    parser.add_argument(
        "--max-mb", type=number(0, exclusive=True), default=10, help="largest upload in megabytes (default: 10)"
    )
    parser.add_argument(
        "--max-megapixels", type=number(0, exclusive=True), default=40, help="largest image in megapixels (default: 40)"
    )
    parser.add_argument(
        "--queue-size", type=integer(), default=64, help="requests that can wait in the queue (default: 64)"
    )
    add_renamed_flag(parser, "--waiting", "--queue-size")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    import signal
    import sys

    from saccade._extras import require
    from saccade.cli import pick_device, print_json

    require("gradio", "web")
    from saccade.web.catalogue import TASKS, Catalogue
    from saccade.web.memory import limit_arenas
    from saccade.web.server import check_address, start
    from saccade.web.service import Service
    from saccade.web.uploads import Limits

    check_address(args.host, args.port)
    limit_arenas()
    catalogue = Catalogue(args.checkpoint, args.model, pick_device(args.device), args.seed)
    service = Service(catalogue, Limits(args.max_mb, args.max_megapixels))
    server = start(service, args.host, args.port, args.queue_size, args.open)
    models = {task: catalogue.names(task) for task in TASKS}
    if args.json:
        print_json({"url": server.url, "models": models})
    else:
        print(f"models: {', '.join(catalogue.entries)}")
        untrained = [entry.name for entry in catalogue.entries.values() if not entry.trained]
        if untrained:
            print(f"randomly initialised, predictions are meaningless: {', '.join(untrained)}")
        print(f"open {server.url} (Ctrl-C stops it)", flush=True)
    if args.host not in ("127.0.0.1", "localhost", "::1"):
        print(
            "saccade serve: anyone who can reach this address can use the page; there is no authentication",
            file=sys.stderr,
        )
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # exit normally: the `finally` below deletes uploads
    try:
        server.page.block_thread()
    finally:
        server.close()
    return 0
