"""`saccade train` and `saccade eval`: files, JSON, errors."""

import json

import pytest
import torch
from PIL import Image

import saccade
from saccade.cli import main
from saccade.models.card import preprocess_of
from saccade.tasks.predict import predict_logits
from tests.engine.runs import arguments


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "first"
    assert main(["train", *arguments("epochs=1"), "--out", str(out), "--quiet", "--seed", "5"]) == 0
    return out


def test_eval_matches_the_accuracy_of_the_run(run, capsys):
    result = json.loads((run / "result.json").read_text())
    assert result["recipe"]["seed"] == 5
    common = ["--data", "scenes", "--size", "32", "--workers", "0", "--set", "scenes=60"]
    assert main(["eval", str(run / "last.safetensors"), *common, "--json", "--out", str(run / "eval")]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["top1"] == pytest.approx(result["final"]["top1"], abs=1e-3)
    assert len(metrics["per_class"]) == 10
    assert json.loads((run / "eval/evaluation.json").read_text()) == metrics
    assert main(["eval", str(run), *common, "--per-class"]) == 0
    out = capsys.readouterr().out
    assert "top-1 %" in out
    assert "crescent" in out


def test_train_json_prints_only_json(tmp_path, capsys):
    assert main(["train", *arguments("epochs=1"), "--out", str(tmp_path / "x"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["out"] == str(tmp_path / "x")


def exit_code(arguments):
    """The exit code of a command; the parser's errors leave through SystemExit."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "svit_nono", "--data", "scenes"], 2, "Did you mean 'svit_nano'"),
        (["--model", "svit_nano"], 1, "no data: give --data PATH"),
        (["--data", "scenes"], 2, "nothing to train"),
        (["--resume"], 1, "run, got no recipe.yaml there. Name the run's folder in --out, or start it with a recipe"),
        (["svit_nano_scenes", "--set", "optimizer.name=foo"], 2, "cannot create optimizer 'foo'"),
        (["--model", "svit_nano", "--head", "foo", "--data", "scenes"], 2, "head must be one of vt_fpn, fpn"),
        (["svit_nano_scenes", "--speed", "3"], 2, "unrecognized arguments: --speed 3"),
        (["svit_nano_cifar", "--data", "scenes"], 2, "Did you mean svit_nano_cifar10?"),
        (["svit_nano_scenes", "--set", "optimizer.learnrate=1"], 2, "unknown key optimizer.learnrate"),
        (["svit_nano_scenes", "--data", "nowhere/at/all"], 1, "no data at nowhere/at/all"),
        (["svit_nano_scenes", "--set", "model.kwargs.stem=wide"], 2, "stem must be one of conv, patch"),
        (["svit_nano_scenes", "--set", "model.checkpoint=missing.pth"], 1, "no such checkpoint"),
        (["svit_nano_scenes", "--set", "model.kwargs={wrong: 1}"], 2, "wrong"),
        (["svit_nano_scenes", "--set", "optimizer.lr=.nan"], 2, "expected finite numbers for optimizer.lr, got nan."),
        (["svit_nano_scenes", "--set", "augment.auto_augment=strong"], 2, "expected 'trivial', 'rand-m9-n2' or '' as"),
        (["svit_nano_scenes", "--set", "augment.auto_augment=a", "--set", "data.cache=false"], 2, "a policy of timm"),
        (["svit_nano_scenes", "--lr", "nan"], 2, "argument --lr: expected a number of at least 0, got nan."),
        (["svit_nano_scenes", "--batch", "0"], 2, "argument --batch: expected an integer of at least 1, got 0."),
    ],
)
def test_train_errors_are_one_line(arguments, code, message, tmp_path, capsys):
    quick = ["--set", "data.image_size=32", "--set", "data.workers=0", "--out", str(tmp_path / "run")]
    assert exit_code(["train", *arguments, *quick]) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("saccade train: ")
    assert err.count("\n") == 1
    assert (tmp_path / "run").exists() == ("a policy of timm" in message)  # which the loader's first batch needs


def test_eval_rejects_options_of_other_tasks(run, tmp_path, capsys):
    assert main(["eval", str(tmp_path / "none.safetensors"), "--data", "scenes"]) == 1
    assert "no such checkpoint" in capsys.readouterr().err
    assert main(["eval", str(run), "--data", "scenes", "--split", "dev"]) == 1
    assert "Choose one of train, val, test." in capsys.readouterr().err
    for options, message in (
        (["--scales", "1", "2"], "scales applies to segmentation"),
        (["--window", "0"], "window applies to segmentation"),
        (["--max-detections", "7"], "max_detections applies to detection"),
    ):
        assert main(["eval", str(run), "--data", "scenes", *options]) == 2
        assert f"{message}, not to classification. Remove it." in capsys.readouterr().err
    Image.new("RGB", (32, 32)).save(tmp_path / "x.png")
    assert main(["predict", str(run), str(tmp_path / "x.png"), "--threshold", "0.1"]) == 2
    assert "threshold applies to detection" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(run)])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("eval", "--size 0", "argument --size: expected an integer from 1 to 16384, got 0."),
        ("eval", "--batch 0", "argument --batch: expected an integer of at least 1, got 0."),
        ("eval", "--crop-pct nan", "argument --crop-pct: expected a number of at least 0.01, got nan."),
        ("eval", "--workers -1", "argument --workers: expected an integer of at least 0, got -1."),
        ("eval", "--views 0 1", "argument --views: expected an integer of at least 1, got 0."),
        ("eval", "--limit -4", "argument --limit: expected an integer of at least 1, got -4."),
        ("eval", "--set scenes=many", "expected an integer of at least 1 for the data option scenes, got 'many'."),
        ("eval", "--set scenes=0", "expected an integer of at least 1 for the data option scenes, got 0."),
        ("predict", "--size 0", "argument --size: expected an integer from 1 to 16384, got 0."),
        ("predict", "--top -1", "argument --top: expected an integer of at least 1, got -1."),
        ("predict", "--threshold nan", "argument --threshold: expected a number from 0 to 1, got nan."),
        ("predict", "--threshold 1.5", "argument --threshold: expected a number from 0 to 1, got 1.5."),
        ("predict", "--views 0 1", "argument --views: expected an integer of at least 1, got 0."),
    ],
)
def test_impossible_numbers_are_refused(run, capsys, command, flags, message):
    words = {"eval": ["--data", "scenes"], "predict": ["cat.png"]}[command]
    assert exit_code([command, str(run), *words, *flags.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"saccade {command}: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [["eval", "--data", "scenes"], ["predict", "x.png"]])
def test_recipe_instead_of_weights_is_refused(capsys, command):
    name, *words = command
    assert main([name, "recipe.yaml", *words]) == 2
    expected = "expected weights or a run folder, got the recipe recipe.yaml. Train it: saccade train recipe.yaml"
    assert capsys.readouterr().err == f"saccade {name}: {expected}\n"


def test_predict_of_one_unreadable_image_is_one_line(run, capsys, tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    assert main(["predict", str(run), str(tmp_path / "bad.png")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"saccade predict: {tmp_path / 'bad.png'}: not a readable image.")
    assert captured.err.count("\n") == 1


def test_eval_flip_averages_with_the_flipped_image(run, capsys):
    command = [
        "eval",
        str(run),
        "--data",
        "scenes",
        "--set",
        "scenes=40",
        "--workers",
        "0",
        "--device",
        "cpu",
        "--json",
    ]
    documents = []
    for flip in ([], ["--flip"]):
        assert main([*command, *flip]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert [document["flip"] for document in documents] == [False, True]
    torch.manual_seed(0)
    model = saccade.create_model("svit_nano", num_classes=5).eval()
    torch.nn.init.normal_(model.get_classifier().weight)
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        original, flipped = (
            predict_logits(model, views, preprocess_of(model)).softmax(1) for views in (images, images.flip(-1))
        )
        average = predict_logits(model, images, preprocess_of(model), flip=True).softmax(1)
    assert (original - flipped).abs().max() > 1e-4
    torch.testing.assert_close(average, (original + flipped) / 2, atol=1e-6, rtol=1e-5)
