"""Assessments, the page and the figure from stored results."""

import json
import math

import pytest

from saccade.reproduce.assess import assess, sentence
from saccade.reproduce.claim import load_claims
from saccade.reproduce.page import draw, markdown
from saccade.reproduce.plan import run_of
from saccade.reproduce.verdict import CONFIRMED, CONTRADICTED, NO_DIFFERENCE, UNDECIDED, UNMEASURED

CLAIMS = load_claims()


def store(out, claim, values, changes=(), shared=False, latency=None, metric="top1"):
    """Write a result for every arm and seed; values by arm."""
    for label, seeds_of_arm in values.items():
        for seed, value in enumerate(seeds_of_arm):
            run = run_of(claim, label, seed, changes)
            metrics = {metric: value} if isinstance(value, float) else value
            result = {"metrics": metrics, "multiply_adds": 150e6, "epochs": 16.0, "minutes": 1.5, "diverged": None}
            result |= {"latency_ms": latency and latency[label], "shared": shared}
            result["machine"] = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-11-18", "commit": "abc1234"}
            file = out / "results" / f"{run.key}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result))


def test_claim_without_results_is_not_measured(tmp_path):
    entries = [assess(claim, tmp_path, 3) for claim in CLAIMS.values()]
    assert {entry["verdict"] for entry in entries} == {UNMEASURED}
    page = markdown(entries, figure="claims.png")
    assert f"**None of the {len(CLAIMS)} claims is measured yet.**" in page
    assert page.count("Not measured yet.") == len(CLAIMS)
    assert "claims.png" not in page
    assert all(f"### {name}\n" in page for name in CLAIMS)
    assert "| filter | `vt_resnet18` | 72.1 | – |" in page


def test_chain_of_orders_needs_every_pair(tmp_path):
    claim = CLAIMS["vt-relation"]
    values = {"transformer": [44.0, 45.0, 44.4], "graph": [42.0, 42.8, 42.5], "none": [40.0, 41.1, 40.6]}
    store(tmp_path, claim, values, shared=True)
    entry = assess(claim, tmp_path, 3)
    assert [pair["verdict"] for pair in entry["pairs"]] == [CONFIRMED, CONFIRMED]
    assert entry["verdict"] == CONFIRMED
    assert entry["pairs"][0]["printed"] == pytest.approx(2.2)
    page = markdown([entry], figure="claims.png")
    assert "| transformer | `vt_resnet18` | 71.5 | 44.47 ± 0.50 | 150 | 16.0 | 1.5 |" in page
    assert "**Confirmed.** The order holds, at its weakest graph > none: +1.87 points of top-1" in page
    assert "Runs shared the device. Measured on NVIDIA H200, torch 2.11, 2026-11-18, commit abc1234." in page
    store(tmp_path, claim, {"none": [42.5, 42.3, 42.6]})
    entry = assess(claim, tmp_path, 3)
    assert entry["verdict"] == NO_DIFFERENCE
    assert "Neither order is shown, graph > none:" in sentence(entry)
    store(tmp_path, claim, {"none": [47.0, 47.9, 47.4]})
    entry = assess(claim._replace(comment="Checked: gradients flow."), tmp_path, 3)
    assert entry["verdict"] == CONTRADICTED
    assert sentence(entry).endswith("Checked: gradients flow.")


def test_claim_with_some_runs_says_how_many(tmp_path):
    claim = CLAIMS["svit-cpe"]
    store(tmp_path, claim, {"CPE": [40.0, 41.0]})
    entry = assess(claim, tmp_path, 3)
    assert (entry["verdict"], entry["runs"], entry["planned"]) == (UNMEASURED, 2, 6)
    assert sentence(entry) == "Not measured: 2 of 6 runs are done."


def test_results_of_changed_recipes_are_not_those_of_the_claim(tmp_path):
    claim, values = CLAIMS["svit-cpe"], {"CPE": [40.0, 41.0, 42.0], "none": [30.0, 31.0, 32.1]}
    store(tmp_path, claim, values, changes=("epochs=1",))
    assert assess(claim, tmp_path, 3)["verdict"] == UNMEASURED
    assert assess(claim, tmp_path, 3, ("epochs=1",))["verdict"] == CONFIRMED


def test_overfitting_shows_training_beside_validation(tmp_path):
    claim = CLAIMS["vt-overfitting"]
    vt = [{"top1": 40.0 + seed, "train_top1": 60.0 + seed, "gap": 20.0 + 0.1 * seed} for seed in range(3)]
    resnet = [{"top1": 38.0 + seed, "train_top1": 48.0 + seed, "gap": 10.0} for seed in range(3)]
    store(tmp_path, claim, {"VT-R18": vt, "R18": resnet})
    entry = assess(claim, tmp_path, 3)
    assert entry["verdict"] == CONFIRMED
    page = markdown([entry])
    heads = "| training top-1 - validation top-1, paper | ours | training top-1, paper | ours | top-1, paper | ours |"
    assert heads in page
    assert "| 4.4 | 20.10 ± 0.10 | 76.5 | 61.00 ± 1.00 | 72.1 | 41.00 ± 1.00 |" in page


def test_missing_number_of_the_paper_is_a_dash(tmp_path):
    claim = CLAIMS["sparseformer-features"]
    store(tmp_path, claim, {"early-conv": [40.0, 41.0, 40.4], "ViT/8": [35.0, 36.2, 35.5], "RGB": [5.0, 5.5, 6.0]})
    entry = assess(claim, tmp_path, 3)
    assert entry["pairs"][1]["power"] is None
    assert "| RGB | `sparseformer_nano` `image_features=rgb` | – | 5.50 ± 0.50 |" in markdown([entry])


def test_equal_latency_compares_the_nearest_arm_only(tmp_path):
    claim = CLAIMS["sparseformer-deit-epochs"]
    values = {"SparseFormer": [40.0, 41.0, 40.5], "DeiT-6": [50.0, 51.2, 50.7], "DeiT-9": [30.0, 31.1, 30.7]}
    values["DeiT-12"] = [60.0, 61.1, 60.2]
    latency = {"SparseFormer": 2.0, "DeiT-6": 1.2, "DeiT-9": 1.9, "DeiT-12": 2.6}
    store(tmp_path, claim, values, latency=latency)
    entry = assess(claim, tmp_path, 3)
    assert [pair["order"] for pair in entry["pairs"]] == ["SparseFormer > DeiT-9"]
    assert entry["verdict"] == CONFIRMED
    assert "Compared: the latency of DeiT-9 is 0.95 of that of SparseFormer." in entry["note"]
    store(tmp_path, claim, values, latency=latency | {"SparseFormer": 4.0})
    entry = assess(claim, tmp_path, 3)
    assert entry["verdict"] == UNDECIDED
    assert "No arm is as fast as SparseFormer: the latency of DeiT-12 is 0.65" in entry["note"]


def test_figure_has_a_row_per_measured_pair(tmp_path):
    claim = CLAIMS["paca-number"]
    store(tmp_path, claim, {"100": [40.0, 41.0, 40.4], "49": [40.1, 40.8, 40.5], "2": [30.0, 31.0, 30.7]})
    figure = draw([assess(claim, tmp_path, 3), assess(CLAIMS["vt-fpn"], tmp_path, 3)])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["paca-number: 100 = 49", "paca-number: 49 > 2"]


def test_assessment_is_valid_json(tmp_path):
    claim = CLAIMS["paca-scope"]
    store(tmp_path, claim, {"stage-wise": [40.0, 41.0, 40.4], "block-wise": [40.1, 40.8, 40.5]})
    entry = assess(claim, tmp_path, 3)
    assert json.loads(json.dumps(entry, allow_nan=False))["verdict"] == CONFIRMED
    assert all(math.isfinite(pair["detectable"]) for pair in entry["pairs"])
