"""The declared claims: every arm builds, arms differ, costs that are called equal are equal."""

import json
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import torch

import saccade
from saccade.benchmark import count
from saccade.engine.recipe import load_recipe
from saccade.reproduce.claim import Arm, Claim, ClaimError, Relation, load_claims, load_released, select
from saccade.reproduce.claim import _parse as parse
from saccade.reproduce.claim import _read as read
from saccade.reproduce.plan import locate_data, plan_runs, run_of
from saccade.reproduce.released import find_release

CLAIMS = load_claims()
SIZE, CLASSES = 96, 200


def by_equal(kind: str) -> list[str]:
    return [name for name, claim in CLAIMS.items() if claim.equal == kind]


def build(arm: Arm, claim: Claim) -> torch.nn.Module:
    torch.manual_seed(0)
    if claim.task == "segmentation":
        return saccade.create_segmenter(arm.model, arm.head, 11, backbone_kwargs=arm.kwargs).eval()
    return saccade.create_model(arm.model, num_classes=CLASSES, **arm.kwargs).eval()


@cache
def cached_cost(claim: str, label: str):
    size = SIZE if CLAIMS[claim].task == "classification" else (360, 480)
    with torch.device("meta"):
        return count(build(CLAIMS[claim].arms[label], CLAIMS[claim]), size)


def cost(claim: str, label: str):
    """Multiply-adds of an arm, counted once for all claims that have it."""
    wanted = CLAIMS[claim].arms[label]
    return cached_cost(
        *next((name, other) for name, c in CLAIMS.items() for other, arm in c.arms.items() if arm == wanted)
    )


def test_claims_are_from_all_papers_and_tables():
    assert Counter(claim.paper for claim in CLAIMS.values()) == {"SViT": 14, "VT": 8, "PaCa-ViT": 8, "SparseFormer": 8}
    tables = {
        paper: {c.table.split()[1] for c in CLAIMS.values() if c.paper == paper} for paper in ("VT", "SparseFormer")
    }
    assert tables == {"VT": set("2345679"), "SparseFormer": {"2", "3a", "3b", "3c", "3d", "3e", "9"}}


@pytest.mark.parametrize("name", CLAIMS)
def test_printed_numbers_have_the_claimed_order(name):
    claim = CLAIMS[name]
    for relation in claim.order:
        left, right = claim.printed[relation.left], claim.printed[relation.right]
        if left is None or right is None:  # "fail" in SparseFormer's Table 3d
            assert (name, relation.right) == ("sparseformer-features", "RGB")
        elif relation.sign == ">":
            assert left > right
        else:
            assert abs(left - right) <= 0.3  # the papers call these equal


@pytest.mark.parametrize("name", CLAIMS)
def test_arms_build_and_differ(name):
    """Two arms of a claim differ in their weights' names or shapes, or else in what they compute from equal weights."""
    claim = CLAIMS[name]
    models = {label: build(arm, claim) for label, arm in claim.arms.items()}
    side = SIZE if claim.task == "classification" else 64
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    labels = list(models)
    for i, first in enumerate(labels):
        for second in labels[i + 1 :]:
            states = [{k: v.shape for k, v in models[label].state_dict().items()} for label in (first, second)]
            if states[0] != states[1]:
                continue
            with torch.inference_mode():
                before = models[second](images)
                weights = models[first].state_dict()
                if name == "sparseformer-regions":  # the option is the initial value of a parameter
                    assert not torch.equal(weights["regions"], models[second].state_dict()["regions"])
                    continue
                models[second].load_state_dict(weights)
                assert not torch.allclose(models[first](images), models[second](images), atol=1e-5), (first, second)
            assert before.isfinite().all()


@pytest.mark.parametrize("model", ["vt_resnet18", "paca_nano", "sparseformer_nano", "svit_nano"])
def test_declared_defaults_are_those_of_the_model(model):
    """An arm without an option is the same model as one with the declared default."""
    defaults = {k: v for name in ("vt", "paca", "sparseformer", "svit") for k, v in read(name)["defaults"].items()}[
        model
    ]
    states, outputs = [], []
    for options in ({}, defaults):
        torch.manual_seed(0)
        network = saccade.create_model(model, num_classes=5, **options).eval()
        states.append(network.state_dict())
        with torch.inference_mode():
            outputs.append(network(torch.ones(1, 3, 64, 64)))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", by_equal("multiply-adds"))
def test_arms_of_equal_cost_have_equal_multiply_adds(name):
    madds = [cost(name, label).madds for label in CLAIMS[name].arms]
    assert max(madds) / min(madds) < 1.05


def test_claims_of_equal_cost_are_those_of_the_papers():
    assert len(by_equal("multiply-adds")) == 9
    assert by_equal("latency") == ["sparseformer-deit-epochs", "sparseformer-deit-time"]


def test_deits_for_equal_latency_enclose_the_cost_of_sparseformer():
    ours, *deits = (cost("sparseformer-deit-epochs", label).madds for label in CLAIMS["sparseformer-deit-epochs"].arms)
    assert deits[0] < ours < deits[-1]


def test_vt_fpn_head_costs_a_fraction_of_fpn():
    heads = [cost("vt-fpn", label).parts["head"].madds for label in ("VT-FPN", "FPN")]
    assert heads[0] < 0.5 * heads[1]


@pytest.mark.parametrize("name", CLAIMS)
def test_recipe_is_valid(name):
    claim = CLAIMS[name]
    recipe = load_recipe(claim.recipe, [("model.head", next(iter(claim.arms.values())).head)])
    assert recipe.data.image_size in (96, 352)
    assert ("time" in name) == (recipe.trainer.max_minutes is not None)
    assert claim.exclusive or not recipe.trainer.max_minutes  # equal time means nothing on a shared device


def test_identical_arms_run_once():
    claims = [CLAIMS[name] for name in ("vt-resnet", "vt-overfitting", "vt-tokenizer", "vt-tokens")]
    runs = plan_runs(claims, seeds=2)
    assert len(runs) == 2 * 6  # VT-R18, R18, clustering, pooling, 32, 64
    assert len({run.key for run in runs}) == len(runs)
    shared = run_of(CLAIMS["vt-tokens"], "16", 0)
    assert {name for run in runs if run.key == shared.key for name, _ in run.uses} == {claim.name for claim in claims}


def test_key_depends_on_everything_that_changes_a_result():
    claim = CLAIMS["svit-cpe"]
    base = run_of(claim, "CPE", 0)
    changed = [
        run_of(claim, "none", 0),
        run_of(claim, "CPE", 1),
        run_of(claim, "CPE", 0, ["epochs=1"]),
        run_of(claim, "CPE", 0, data={"scenes": "scenes"}),
        run_of(claim._replace(recipe=claim.recipe | {"epochs": 3}), "CPE", 0),
        run_of(claim._replace(exclusive=True), "CPE", 0),
    ]
    assert len({run.key for run in [base, *changed]}) == 7
    assert run_of(claim, "CPE", 0, data={"tiny-imagenet": "/elsewhere/tiny-imagenet"}).key == base.key


def test_default_order_begins_with_one_claim_per_table():
    order = [(claim.paper, claim.table) for claim in select([], CLAIMS)]
    tables = len(set(order))
    assert len(order) == len(CLAIMS)
    assert len(set(order[:tables])) == tables
    assert len({paper for paper, _ in order[:4]}) == 4  # kernels of all families are compiled at the same time


def test_selection_by_name_and_family():
    assert [claim.name for claim in select(["svit-grid"], CLAIMS)] == ["svit-grid-one-stage", "svit-grid-three-stages"]
    with pytest.raises(ClaimError, match=r"got 'svit-cpr'. Did you mean svit-cpe\?"):
        select(["svit-cpr"], CLAIMS)


def test_data_sets_are_matched_by_name_and_a_single_other_one_replaces_them():
    vision, dense = CLAIMS["svit-cpe"], CLAIMS["vt-fpn"]
    possible, paths = locate_data([vision, dense], ["a/tiny-imagenet", "b/camvid"], named=True)
    assert (len(possible), paths) == (2, {"tiny-imagenet": "a/tiny-imagenet", "camvid": "b/camvid"})
    assert locate_data([vision, dense], ["scenes"], named=True)[0] == [vision, dense]
    assert locate_data([vision, dense], ["a/tiny-imagenet"], named=False)[0] == [vision]
    assert locate_data([vision, dense], ["a/cifar10"], named=False)[0] == [vision]
    assert run_of(vision, "CPE", 0, data={"cifar10": "a/cifar10"}).data == "cifar10"
    with pytest.raises(ClaimError, match=r"vt-fpn needs the data set camvid"):
        locate_data([vision, dense], ["a/tiny-imagenet"], named=True)
    with pytest.raises(ClaimError, match="got none"):
        locate_data([vision], [], named=False)


def test_wrong_declarations_are_errors():
    fields = {"paper": "P", "table": "T", "statement": "s", "recipe": "tiny-imagenet", "model": "svit_nano"}
    fields |= {"arms": {"a": {}, "b": {"iterations": 0}}, "order": ["a > b"], "printed": {"a": 2, "b": 1}}
    assert parse("x", fields, read("recipes"), {}).order == [Relation("a", ">", "b")]
    for change, message in (
        ({"order": ["a > c"]}, "an order of two of a, b"),
        ({"printed": {"a": 2}}, "a printed number or null for a, b"),
        ({"order": ["a = b"]}, "a margin with = and >= only"),
        ({"metric": "speed"}, "expected a metric of top1"),
    ):
        with pytest.raises(ClaimError, match=message):
            parse("x", fields | change, read("recipes"), {})


def test_released_comparisons_name_files_with_a_printed_accuracy():
    released = load_released()
    assert set(released) == {"paca-clusters", "paca-models", "sparseformer-models"}
    assert not set(released) & set(CLAIMS)
    rows = {name: find_release(name).accuracy for name in released["paca-clusters"].weights.values()}
    assert len(rows) == 7
    assert rows["paca_small.in1k_c2"] == "82.28 top-1"
    assert all(find_release(name) for entry in released.values() for name in entry.weights.values())


def test_claim_files_are_package_data():
    root = Path(__file__).parents[2]
    lines = (root / "pyproject.toml").read_text().splitlines()
    patterns = json.loads(lines[lines.index("[tool.setuptools.package-data]") + 1].partition("= ")[2])
    for path in (root / "saccade/reproduce/claims").iterdir():
        assert any(fnmatch(str(path.relative_to(root / "saccade")), pattern) for pattern in patterns)
