"""Video classification from the command line: train, eval, predict."""

import json

import pytest

from saccade.cli import main
from saccade.data.synthetic.motions import MOTIONS, write_motions
from tests.engine.tasks.test_classify_video import TINY
from tests.walk.test_cli import run


@pytest.fixture(scope="module")
def motions(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_motions(root, clips=8, size=40, frames=12)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory, motions):
    """Train for one epoch with `saccade train`."""
    out = tmp_path_factory.mktemp("walk") / "run"
    options = TINY.partition("kwargs: ")[2].removesuffix("}")
    changes = (f"model.kwargs={options}", "data={image_size: 32, frames: 4, workers: 0, stride: 2}", "batch_size=4",
               "epochs=1", "trainer.log_every=1")  # fmt: skip
    settings = [word for change in changes for word in ("--set", change)]
    model = ["--model", "video_sparseformer_nano", "--set", f"data.path={motions}"]
    assert main(["train", *settings, *model, "--out", str(out), "--quiet", "--device", "cpu"]) == 0
    return out


def test_eval_averages_views(capsys, folder, motions):
    command = ["eval", str(folder), "--data", str(motions), "--split", "val", "--workers", "0", "--device", "cpu"]
    code, out, _ = run(capsys, *command, "--json", "--views", "2", "3")
    document = json.loads(out)
    assert code == 0
    assert document["count"] == 8
    assert list(document["per_class"]) == sorted(MOTIONS)
    assert 0 <= document["top1"] <= document["top5"] <= 100
    code, out, _ = run(capsys, *command)
    assert "top-1 %" in out


def test_predict_lists_classes_per_video(capsys, folder, motions, tmp_path):
    (motions / "val" / "left" / "broken.mp4").write_bytes(b"nothing")
    command = ["predict", str(folder), str(motions / "val"), "--top", "3", "--out", str(tmp_path), "--device", "cpu"]
    code, out, err = run(capsys, *command, "--views", "2", "1")
    document = json.loads((tmp_path / "predictions.json").read_text())
    assert code == 0
    assert "broken.mp4" in err
    assert len(document["unreadable"]) == 1
    assert len(document["predictions"]) == 8
    for entry in document["predictions"]:
        probabilities = [row["probability"] for row in entry["classes"]]
        assert len(probabilities) == 3
        assert probabilities == sorted(probabilities, reverse=True)
        assert all(row["name"] in MOTIONS for row in entry["classes"])
        assert entry["image"] in out


def test_predict_rejects_a_folder_without_videos(capsys, folder, tmp_path):
    (tmp_path / "photo.png").write_bytes(b"no video")
    code, _, err = run(capsys, "predict", str(folder), str(tmp_path), "--device", "cpu")
    assert code == 1
    assert "contains no videos" in err


def test_image_model_predicts_frames_and_urls(capsys, motions, tmp_path):
    from saccade.data.synthetic.photos import photo_paths
    from tests.weights.folder import SHIPPED, weights_in

    clip = sorted((motions / "val" / "right").glob("*.mp4"))[0]
    command = ["predict", "vt_nano", str(clip), photo_paths()["cat"].as_uri(), "--every", "0.5", "--top", "1"]
    with weights_in(SHIPPED):
        code, out, _ = run(capsys, *command, "--csv", "--device", "cpu")
        missing = run(capsys, "predict", "vt_nano", str(tmp_path / "none.jpg"))
    names = [line.partition(",")[0] for line in out.splitlines()[1:]]
    frames = [str(clip.with_name(f"{clip.stem}-{time}s.mp4")) for time in ("0.00", "0.50")]
    assert code == 0
    assert names == [*frames, photo_paths()["cat"].as_uri()]
    assert missing[0] == 1
    assert "no such file or folder" in missing[2]
