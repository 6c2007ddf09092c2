"""Run a fuzz target: `python -m tests.fuzz image --inputs 1000000`.

Prints one line of JSON: inputs, rejected inputs, peak memory, the slowest input and what failed. Failing inputs are
written to --out; the exit code is 1 if there are any. `--atheris` runs libFuzzer with coverage of saccade instead.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; pip install 'saccade[fuzz]'")
    options = parser.parse_args()
    if options.atheris:
        return run_atheris(options)
    from tests.fuzz.driver import run

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff and FFmpeg print a line per damaged file

    report = run(options.target, options.inputs, options.seed, options.out)
    print(json.dumps(report._asdict()))
    return 1 if report.failures else 0


def run_atheris(options: argparse.Namespace) -> int:
    """libFuzzer stops at the first failure, at 5 seconds and at 1000 MB; a failing input is written to --out."""
    import atheris

    with atheris.instrument_imports(include=["saccade.data", "saccade.models.checkpoint", "saccade.models.card"]):
        import tests.fuzz.targets as targets
    target = targets.TARGETS[options.target]
    corpus = options.out / f"corpus-{options.target}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)

    def run_one(data: bytes) -> None:
        with contextlib.suppress(*target.errors):
            target.run(data)

    limits = ["-timeout=5", "-rss_limit_mb=1000", "-max_len=16384", "-print_final_stats=1", "-verbosity=1"]
    arguments = [f"-runs={options.inputs}", f"-seed={options.seed + 1}", f"-artifact_prefix={options.out}/", *limits]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], run_one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
