"""Stored results -> what they say about every claim, as plain values for the page, the terminal and JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.reproduce.claim import METRICS, Claim, Relation
from saccade.reproduce.plan import run_of
from saccade.reproduce.runner import read_result
from saccade.reproduce.verdict import (
    CONFIRMED,
    CONTRADICTED,
    NO_DIFFERENCE,
    UNDECIDED,
    UNMEASURED,
    allowed,
    combine,
    compare,
)

LATENCY_RATIO = 1.25  # arms whose latencies differ by more than this factor are not compared


def assess(
    claim: Claim, out: Path, seeds: int, changes: Sequence[str] = (), data: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Arms, paired comparisons and verdict of a claim, from the results stored in `out`."""
    runs = {label: [run_of(claim, label, seed, changes, data) for seed in range(seeds)] for label in claim.arms}
    results = {label: [read_result(out, run.key) for run in planned] for label, planned in runs.items()}
    order, note, comparable = claim.order, "", True
    if claim.equal == "latency":
        order, note, comparable = nearest_latency(claim, results)
    pairs = [assess_pair(claim, relation, results, len(order)) for relation in order]
    verdict = combine([pair["verdict"] for pair in pairs])
    if not comparable and verdict != UNMEASURED:
        verdict = UNDECIDED
    done = [result for group in results.values() for result in group if result is not None]
    used = runs[next(iter(runs))][0] if seeds else None
    return {
        "claim": claim.name,
        "paper": claim.paper,
        "table": claim.table,
        "statement": claim.statement,
        "metric": claim.metric,
        "data": used.data if used else claim.data,
        "arms": {label: assess_arm(claim, label, results[label]) for label in claim.arms},
        "pairs": pairs,
        "verdict": verdict,
        "runs": len(done),
        "planned": seeds * len(claim.arms),
        "shared": any(result["shared"] for result in done),
        "machines": sorted({describe_machine(result) for result in done}),
        "note": " ".join(filter(None, (claim.note, note))),
        "comment": claim.comment,
    }


def assess_arm(claim: Claim, label: str, results: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Mean and spread over the seeds of the claim's metric and of those shown beside it."""
    done = [result for result in results if result is not None]
    metrics = {}
    for metric in (claim.metric, *claim.beside):
        values = [value for result in results if (value := value_of(result, metric)) is not None]
        printed = claim.printed if metric == claim.metric else claim.printed_beside[metric]
        metrics[metric] = {
            "printed": printed[label],
            "values": values,
            "mean": statistics.fmean(values) if values else None,
            "spread": statistics.stdev(values) if len(values) > 1 else None,
        }
    costs = [result for result in done if result["multiply_adds"]]
    return {
        "model": "+".join(filter(None, claim.arms[label][:2])),
        "kwargs": claim.arms[label].kwargs,
        "metrics": metrics,
        "multiply_adds": costs[0]["multiply_adds"] if costs else None,
        "epochs": statistics.fmean(result["epochs"] for result in costs) if costs else None,
        "minutes": statistics.fmean(result["minutes"] for result in costs) if costs else None,
        "latency_ms": mean_latency(results),
        "diverged": sum(result["diverged"] is not None for result in done),
    }


def assess_pair(
    claim: Claim, relation: Relation, results: Mapping[str, list[dict[str, Any] | None]], pairs: int
) -> dict[str, Any]:
    """The paired comparison of two arms, over the seeds that both have."""
    both = [
        (left, right)
        for first, second in zip(results[relation.left], results[relation.right], strict=True)
        if (left := value_of(first, claim.metric)) is not None and (right := value_of(second, claim.metric)) is not None
    ]
    left, right = claim.printed[relation.left], claim.printed[relation.right]
    printed = None if left is None or right is None else left - right
    document: dict[str, Any] = {"order": str(relation), "sign": relation.sign, "seeds": len(both), "printed": printed}
    document["least"] = allowed(relation.sign, claim.margin)[0]  # lower bound of what the claim allows
    if len(both) < 2:
        return document | {"verdict": UNMEASURED}
    lefts, rights = zip(*both, strict=True)
    return document | compare(lefts, rights, relation.sign, claim.margin, printed, pairs)._asdict()


def value_of(result: dict[str, Any] | None, metric: str) -> float | None:
    return None if result is None else result["metrics"].get(metric)


def nearest_latency(
    claim: Claim, results: Mapping[str, list[dict[str, Any] | None]]
) -> tuple[list[Relation], str, bool]:
    """The relation whose right arm is as fast as its left one, a sentence about it, and whether it is fast enough."""
    ratios = {}
    for relation in claim.order:
        left, right = mean_latency(results[relation.left]), mean_latency(results[relation.right])
        if left and right:
            ratios[relation] = right / left
    if len(ratios) < len(claim.order):
        return claim.order, "", True
    nearest = min(ratios, key=lambda relation: abs(math.log(ratios[relation])))
    text = f"the latency of {nearest.right} is {ratios[nearest]:.2f} of that of {nearest.left}."
    comparable = 1 / LATENCY_RATIO <= ratios[nearest] <= LATENCY_RATIO
    return [nearest], f"Compared: {text}" if comparable else f"No arm is as fast as {nearest.left}: {text}", comparable


def mean_latency(results: Sequence[dict[str, Any] | None]) -> float | None:
    values = [result["latency_ms"] for result in results if result is not None and result["latency_ms"]]
    return statistics.fmean(values) if values else None


def describe_machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    commit = f", commit {machine['commit']}" if machine.get("commit") else ""
    return f"{machine['device']}, torch {machine['torch']}, {machine['date']}{commit}"


def sentence(assessment: dict[str, Any]) -> str:
    """One sentence on what the runs show, and on what they cannot."""
    pairs, verdict = assessment["pairs"], assessment["verdict"]
    unit = METRICS[assessment["metric"]]
    if verdict == UNMEASURED:
        done, planned = assessment["runs"], assessment["planned"]
        return f"Not measured: {done} of {planned} runs are done." if done else "Not measured yet."
    deciding = [pair for pair in pairs if pair["verdict"] == combine([pair["verdict"] for pair in pairs])]
    weakest = min(deciding, key=lambda pair: pair["low"] - pair["least"])
    effect = (
        f"{weakest['order']}: {weakest['mean']:+.2f} points of {unit} (90 % interval {weakest['low']:+.2f} to "
        f"{weakest['high']:+.2f}, {weakest['seeds']} seeds)"
    )
    detectable = f"differences below {weakest['detectable']:.1f} points were likely to be missed"
    text = {
        CONFIRMED: f"The order holds, {'at its weakest ' if len(pairs) > 1 else ''}{effect}.",
        NO_DIFFERENCE: f"Neither order is shown, {effect}; {detectable}.",
        UNDECIDED: f"Neither the claim nor its opposite is shown, {effect}.",
        CONTRADICTED: f"The opposite is shown, {effect}.",
    }[verdict]
    return " ".join(filter(None, (text, assessment["comment"])))
