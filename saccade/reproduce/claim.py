"""The claims: comparisons that the papers make, declared in claims/*.yaml.

A claim has arms (keyword arguments of a model, or another model), the order expected of them, the numbers that the
paper prints, and one recipe for all arms.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, NamedTuple

from saccade._errors import UsageError
from saccade._extras import require

PAPER_FILES = ("vt", "paca", "sparseformer", "svit", "peers")
METRICS = {
    "top1": "top-1",
    "train_top1": "training top-1",
    "gap": "training top-1 - validation top-1",
    "miou": "mIoU",
}


class ClaimError(UsageError):
    """An unknown claim, or one that is not declared correctly."""


class Arm(NamedTuple):
    """One side of a comparison."""

    model: str
    head: str = ""
    kwargs: dict[str, Any] = {}  # noqa: RUF012 (never changed) # of the model, without its defaults


class Relation(NamedTuple):
    """An expected order of two arms."""

    left: str
    sign: str  # ">", "=" or ">="
    right: str

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"


class Claim(NamedTuple):
    """A comparison that a paper makes and how it is repeated."""

    name: str
    paper: str
    table: str
    statement: str
    arms: dict[str, Arm]
    order: list[Relation]
    printed: dict[str, float | None]  # of the metric in the paper, by arm; None where it prints no number
    data: str  # name of the data set
    recipe: dict[str, Any]  # the same for all arms, without model and seed
    metric: str = "top1"
    margin: float = 0.0  # points within which "=" and ">=" hold
    equal: str = ""  # "multiply-adds": asserted by a test; "latency": the right arm with the nearest one is compared
    exclusive: bool = False  # runs have the device to themselves
    beside: list[str] = []  # noqa: RUF012 # further metrics to show
    printed_beside: dict[str, dict[str, float]] = {}  # noqa: RUF012
    note: str = ""  # how the runs differ from the paper's
    comment: str = ""  # what an investigation of the result matching

    @property
    def task(self) -> str:
        return self.recipe["task"]


class Released(NamedTuple):
    """Released weights whose printed accuracy is measured again on the paper's own data."""

    name: str
    paper: str
    table: str
    statement: str
    weights: dict[str, str]  # label of a row -> name of the released file


def load_claims() -> dict[str, Claim]:
    """All claims by name, in the order of the files."""
    documents = [_read(name) for name in PAPER_FILES]
    recipes = _read("recipes")
    defaults = {model: options for document in documents for model, options in document.get("defaults", {}).items()}
    claims: dict[str, Claim] = {}
    for document in documents:
        for name, fields in document["claims"].items():
            shared = {key: document[key] for key in ("paper", "recipe", "model") if key in document}
            claims[name] = _parse(name, shared | fields, recipes, defaults)
    return claims


def load_released() -> dict[str, Released]:
    """All comparisons of released weights by name."""
    return {
        name: Released(name, document["paper"], **fields)
        for document in map(_read, PAPER_FILES)
        for name, fields in document.get("released", {}).items()
    }


def select(names: Sequence[str], claims: dict[str, Claim]) -> list[Claim]:
    """The claims with these names or prefixes ("svit").

    Without names all: one per table of a paper first, and the papers in turn, so that the first processes compile the
    kernels of different families.
    """
    if not names:
        tables: set[tuple[str, str]] = set()
        first = [claim for claim in claims.values() if _is_new((claim.paper, claim.table), tables)]
        return _in_turn(first) + _in_turn([claim for claim in claims.values() if claim not in first])
    chosen: dict[str, Claim] = {}
    for name in names:
        matching = [claims[name]] if name in claims else [c for c in claims.values() if c.name.startswith(f"{name}-")]
        if not matching:
            close = get_close_matches(name, claims, 1)
            hint = f"Did you mean {close[0]}?" if close else "saccade reproduce --list lists them."
            raise ClaimError(f"expected a claim, got {name!r}. {hint}")
        chosen |= {claim.name: claim for claim in matching}
    return list(chosen.values())


def _in_turn(claims: list[Claim]) -> list[Claim]:
    """One claim of every paper, then the next one of every paper."""
    papers = [claim.paper for claim in claims]
    order = sorted(range(len(claims)), key=lambda i: papers[:i].count(papers[i]))
    return [claims[i] for i in order]


def _is_new(key: tuple[str, str], tables: set[tuple[str, str]]) -> bool:
    new = key not in tables
    tables.add(key)
    return new


def _read(name: str) -> dict[str, Any]:
    text = files("saccade.reproduce").joinpath(f"claims/{name}.yaml").read_text(encoding="utf-8")
    return require("yaml", "train").safe_load(text)


def _parse(name: str, fields: dict[str, Any], recipes: dict[str, Any], defaults: dict[str, dict[str, Any]]) -> Claim:
    fields = dict(fields)
    recipe, model = recipes[fields.pop("recipe")], fields.pop("model", "")
    arms = {label: _parse_arm(model, options, defaults) for label, options in fields.pop("arms").items()}
    order = [_parse_relation(name, text, arms) for text in fields.pop("order")]
    claim = Claim(name, arms=arms, order=order, data=recipe["data"], recipe=recipe["recipe"], **fields)
    if set(claim.printed) != set(arms):
        raise ClaimError(f"{name}: expected a printed number or null for {', '.join(arms)}, got {claim.printed}.")
    if claim.metric not in METRICS:
        raise ClaimError(f"{name}: expected a metric of {', '.join(METRICS)}, got {claim.metric!r}.")
    if any(relation.sign != ">" for relation in order) != (claim.margin > 0):
        raise ClaimError(f"{name}: expected a margin with = and >= only, got {claim.margin}.")
    return claim


def _parse_arm(model: str, options: dict[str, Any], defaults: dict[str, dict[str, Any]]) -> Arm:
    kwargs = dict(options)
    name, head = kwargs.pop("model", model), kwargs.pop("head", "")
    usual = defaults.get(name, {})
    return Arm(name, head, {key: value for key, value in kwargs.items() if key not in usual or usual[key] != value})


def _parse_relation(name: str, text: str, arms: dict[str, Arm]) -> Relation:
    match = re.fullmatch(r"(.+) (>=|>|=) (.+)", text)
    if match is None or not {match[1], match[3]} <= set(arms):
        raise ClaimError(f"{name}: expected an order of two of {', '.join(arms)}, got {text!r}.")
    return Relation(match[1], match[2], match[3])
