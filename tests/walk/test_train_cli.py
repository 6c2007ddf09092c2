"""`saccade train` and `saccade eval` as a person uses them."""

import json

import pytest
import torch

import saccade
from saccade.cli import main
from saccade.engine.tasks.evaluate_classifier import predict_logits
from saccade.models.card import preprocess_of
from tests.engine.runs import arguments


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "first"
    assert main(["train", *arguments("epochs=1"), "--out", str(out), "--quiet", "--seed", "5"]) == 0
    return out


def test_train_then_eval(run, capsys):
    result = json.loads((run / "result.json").read_text())
    assert result["recipe"]["seed"] == 5
    common = ["--data", "scenes", "--size", "32", "--workers", "0", "--set", "scenes=60"]
    assert main(["eval", str(run / "last.safetensors"), *common, "--json", "--out", str(run / "eval")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["top1"] == pytest.approx(result["final"]["top1"], abs=1e-3)
    assert len(found["per_class"]) == 10
    assert json.loads((run / "eval/evaluation.json").read_text()) == found
    assert main(["eval", str(run), *common, "--per-class"]) == 0
    told = capsys.readouterr().out
    assert "top-1 %" in told
    assert "crescent" in told


def test_train_json_is_only_json(tmp_path, capsys):
    assert main(["train", *arguments("epochs=1"), "--out", str(tmp_path / "x"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["out"] == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "svit_nono", "--data", "scenes"], "Did you mean 'svit_nano'"),
        (["--model", "svit_nano"], "no data: give --data PATH"),
        (["--data", "scenes"], "nothing to train"),
        (["svit_nano_cifar", "--data", "scenes"], "Did you mean svit_nano_cifar10?"),
        (["svit_nano_scenes", "--set", "optimizer.learnrate=1"], "unknown key optimizer.learnrate"),
        (["svit_nano_scenes", "--data", "nowhere/at/all"], "no data at nowhere/at/all"),
        (["svit_nano_scenes", "--set", "model.kwargs.stem=wide"], "stem must be one of conv, patch"),
        (["svit_nano_scenes", "--set", "model.checkpoint=missing.pth"], "no such checkpoint"),
        (
            ["svit_nano_scenes", "--set", "data.scenes=20", "--set", "batch_size=64"],
            "must not exceed the 20 training images. Lower it",
        ),
        (["svit_nano_scenes", "--set", "model.kwargs={wrong: 1}"], "wrong"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(words, message, tmp_path, capsys):
    quick = ["--set", "data.image_size=32", "--set", "data.workers=0", "--out", str(tmp_path / "run")]
    assert main(["train", *words, *quick]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("saccade train: ")
    assert told.count("\n") == 1


def test_eval_mistakes(run, tmp_path, capsys):
    assert main(["eval", str(tmp_path / "none.safetensors"), "--data", "scenes"]) == 1
    assert "no such checkpoint" in capsys.readouterr().err
    assert main(["eval", str(run), "--data", "scenes", "--split", "dev"]) == 1
    assert "it has train, val, test" in capsys.readouterr().err
    for words, wanted in (
        (["--scales", "1", "2"], "--scales is for segmentation"),
        (["--window", "0"], "--window is for segmentation"),
        (["--max-detections", "7"], "--max-detections is for detection"),
    ):
        assert main(["eval", str(run), "--data", "scenes", *words]) == 1
        assert f"{wanted}; {run} is for classification: leave it out." in capsys.readouterr().err
    assert main(["predict", str(run), str(tmp_path / "x.png"), "--threshold", "0.1"]) == 1
    assert "--threshold is for detection" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(run)])
    assert stop.value.code == 2


def test_eval_averages_with_the_mirrored_picture(run, capsys):
    words = ["eval", str(run), "--data", "scenes", "--set", "scenes=40", "--workers", "0", "--device", "cpu", "--json"]
    found = []
    for flip in ([], ["--flip"]):
        assert main([*words, *flip]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [document["flip"] for document in found] == [False, True]
    torch.manual_seed(0)
    model = saccade.create_model("svit_nano", num_classes=5).eval()
    torch.nn.init.normal_(model.get_classifier().weight)
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        once, again = (
            predict_logits(model, views, preprocess_of(model)).softmax(1) for views in (images, images.flip(-1))
        )
        both = predict_logits(model, images, preprocess_of(model), flip=True).softmax(1)
    assert (once - again).abs().max() > 1e-3
    torch.testing.assert_close(both, (once + again) / 2, atol=1e-5, rtol=1e-5)
