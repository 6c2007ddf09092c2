"""Run a fuzz target: `python -m tests.fuzz image --inputs 1000000`.

Prints one line of JSON: inputs, rejected inputs, peak memory, the slowest input and what failed. Failing inputs are
written to --out; the exit code is 1 if there are any. `--atheris` runs libFuzzer with coverage of saccade instead,
and ends at the first failure.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import time
import warnings
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; pip install 'saccade[fuzz]'")
    parser.add_argument("--seconds", type=int, default=0, help="of an --atheris run, which ends at --inputs otherwise")
    options = parser.parse_args()
    if options.seconds and not options.atheris:
        parser.error("expected --seconds with --atheris. Use --inputs.")
    if options.atheris:
        return run_atheris(options)
    from tests.fuzz.driver import run

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff and FFmpeg print a line per damaged file

    report = run(options.target, options.inputs, options.seed, options.out)
    print(json.dumps(report._asdict()))
    return 1 if report.failures else 0


COVERED = ["saccade.data", "saccade.engine.recipe", "saccade.models.card", "saccade.models.checkpoint", "saccade.web"]


def run_atheris(options: argparse.Namespace) -> int:
    """libFuzzer stops at the first failure, which is written to --out, with the limits of the driver."""
    import atheris

    with atheris.instrument_imports(include=COVERED):
        import tests.fuzz.targets as targets
    from tests.fuzz.driver import MAX_BLOCKED, MAX_MEGABYTES, MAX_SECONDS

    target = targets.TARGETS[options.target]
    seeds = target.seeds()
    corpus = options.out / f"corpus-{options.target}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    def run_one(data: bytes) -> None:
        start = time.process_time()
        with contextlib.suppress(*target.errors):
            target.run(data)
        if time.process_time() - start > MAX_SECONDS:
            raise TimeoutError(f"more than {MAX_SECONDS:g} s of CPU time")

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        """libFuzzer's mutations, or those that keep the structure of the file."""
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return atheris.Mutate(data, max_size)
        try:
            return target.mutate(data, rng, seeds)[:max_size]
        except (ValueError, LookupError, TypeError, AttributeError):  # no longer JSON
            return atheris.Mutate(data, max_size)

    limits = [f"-timeout={MAX_BLOCKED:.0f}", f"-rss_limit_mb={MAX_MEGABYTES:.0f}", "-max_len=16384"]
    end = f"-max_total_time={options.seconds}" if options.seconds else f"-runs={options.inputs}"
    output = [f"-artifact_prefix={options.out}/{options.target}-", "-print_final_stats=1", "-verbosity=1"]
    arguments = [sys.argv[0], end, f"-seed={options.seed + 1}", *limits, *output, str(corpus)]
    atheris.Setup(arguments, run_one, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
