"""The runs of claims: arm x seed, each once however many claims use it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from saccade.engine.recipe import load_recipe
from saccade.reproduce.claim import Arm, Claim, ClaimError

EMBEDDED = "scenes"


class PlannedRun(NamedTuple):
    """One training run."""

    arm: Arm
    seed: int
    data: str  # name of the data set
    recipe: dict[str, Any]
    changes: tuple[str, ...] = ()  # "epochs=1", of all runs
    exclusive: bool = False  # has the device to itself, and its latency is measured
    uses: tuple[tuple[str, str], ...] = ()  # claims and the labels of their arms

    def describe(self) -> dict[str, Any]:
        """Everything that decides the result, and nothing else."""
        return {
            "model": self.arm.model,
            "head": self.arm.head,
            "kwargs": self.arm.kwargs,
            "seed": self.seed,
            "data": self.data,
            "recipe": self.recipe,
            "changes": list(self.changes),
            "exclusive": self.exclusive,
        }

    @property
    def key(self) -> str:
        """The address of the result: 16 hexadecimal digits of the hash of `describe`."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        claim, label = self.uses[0]
        more = f" (and of {len(self.uses) - 1} more)" if len(self.uses) > 1 else ""
        return f"{claim}: {label}, seed {self.seed}{more}"

    @property
    def minutes(self) -> float:
        """The time limit of the recipe; 0 without one."""
        return self.recipe["trainer"].get("max_minutes") or 0.0


def plan_runs(
    claims: Sequence[Claim], seeds: int, changes: Sequence[str] = (), data: Mapping[str, str] | None = None
) -> list[PlannedRun]:
    """The runs of the claims, claim by claim and seed by seed.

    data: paths by the name of their data set; None for every claim's own data set.
    """
    runs: dict[str, PlannedRun] = {}
    for claim in claims:
        if changes:
            load_recipe(claim.recipe, changes)  # an invalid change fails here, not in every run
        for seed in range(seeds):
            for label in claim.arms:
                run = run_of(claim, label, seed, changes, data)
                planned = runs.get(run.key, run._replace(uses=()))
                runs[run.key] = planned._replace(uses=(*planned.uses, *run.uses))
    return list(runs.values())


def run_of(
    claim: Claim, label: str, seed: int, changes: Sequence[str] = (), data: Mapping[str, str] | None = None
) -> PlannedRun:
    """The run of one arm of a claim; without its own data set in `data`, on the only one there."""
    name = claim.data if data is None or claim.data in data else next(iter(data))
    uses = ((claim.name, label),)
    return PlannedRun(claim.arms[label], seed, name, claim.recipe, tuple(changes), claim.exclusive, uses)


def locate_data(claims: Sequence[Claim], paths: Sequence[str], named: bool) -> tuple[list[Claim], dict[str, str]]:
    """The claims that can run on the given paths, and the path of every data set by its name.

    A data set is named by the last part of its path. A single path of another data set, such as "scenes", replaces
    that of every claim. `named`: whether the user chose the claims, so that one without data is an error.
    """
    by_name = {Path(path).name: path for path in paths}
    wanted = sorted({claim.data for claim in claims})
    if not paths:
        raise ClaimError(f"expected --data with the folder {' and the folder '.join(wanted)} (or scenes), got none.")
    if len(by_name) == 1 and not set(by_name) & set(wanted):
        dense = EMBEDDED in by_name  # has masks, too
        possible = [claim for claim in claims if claim.task == "classification" or dense]
    else:
        possible = [claim for claim in claims if claim.data in by_name]
    missing = next((claim for claim in claims if claim not in possible), None)
    if missing is not None and (named or not possible):
        raise ClaimError(f"{missing.name} needs the data set {missing.data}, got --data {' '.join(paths)}. Add it.")
    return possible, by_name
