"""Embedded weights: registered with timm, loaded offline."""

import re
import subprocess
import sys

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import saccade
from saccade import weights
from saccade.data.synthetic.photos import photo_paths
from saccade.data.synthetic.scenes import Scenes
from saccade.models.card import read_card, readable
from saccade.tasks.load import card_of, load
from tests.weights.folder import SHIPPED, WORDNET, load_tool, make_run, weights_in

NANO = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")
IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path):
    """A folder that contains svit_nano.tiny_imagenet."""
    with weights_in(tmp_path / "weights"):
        load_tool().embed(make_run(tmp_path / "run"), "tiny_imagenet")
        with weights_in(tmp_path / "weights"):
            yield tmp_path / "weights"


def test_embedded_run_becomes_a_timm_tag(folder, tmp_path):
    assert sorted(path.name for path in folder.iterdir()) == [
        "svit_nano.tiny_imagenet.md",
        "svit_nano.tiny_imagenet.safetensors",
    ]
    run = load_file(tmp_path / "run" / "best.safetensors")
    tagged = timm.create_model("svit_nano.tiny_imagenet", pretrained=True)
    for model in (tagged, saccade.create_model("svit_nano", pretrained=True)):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, run[key].half().float() if value.is_floating_point() else run[key])
    assert "svit_nano.tiny_imagenet" in timm.list_pretrained("svit*")
    assert timm.is_model_pretrained("svit_nano")
    data = timm.data.resolve_model_data_config(tagged)
    assert (data["input_size"], data["crop_pct"]) == ((3, 64, 64), 0.9)
    assert tagged.pretrained_cfg["label_names"] == ("tabby", "espresso", "goldfish", "crane")


def test_default_number_of_classes_is_unchanged(folder):
    assert saccade.create_model("svit_nano").num_classes == 1000
    assert timm.create_model("svit_nano.tiny_imagenet").num_classes == 4


def test_weights_adapt_to_classes_channels_and_features_only(folder):
    source = saccade.create_model("svit_nano", pretrained=True).eval()
    other = saccade.create_model("svit_nano", pretrained=True, num_classes=7).eval()
    assert other(IMAGES).shape == (2, 7)
    torch.testing.assert_close(other.forward_features(IMAGES), source.forward_features(IMAGES))
    grey = saccade.create_model("svit_nano", pretrained=True, in_chans=1).eval()
    torch.testing.assert_close(grey(IMAGES[:, :1]), source(IMAGES[:, :1].expand(-1, 3, -1, -1)), rtol=1e-3, atol=1e-4)
    maps = saccade.create_model("svit_nano", pretrained=True, features_only=True).eval()(IMAGES)
    torch.testing.assert_close(maps[-1], source.forward_intermediates(IMAGES, intermediates_only=True)[-1])


@pytest.mark.parametrize("name", NANO)
def test_every_family_can_be_embedded(name, tmp_path):
    with weights_in(tmp_path):
        path = load_tool().embed(make_run(tmp_path / "run", name), "tiny_imagenet")
        assert path.stat().st_size < weights.MAX_FILE_BYTES
        with weights_in(tmp_path):
            model = timm.create_model(name, pretrained=True).eval()
            opened = load(f"{name}.tiny_imagenet")
            card = card_of(opened)
            torch.testing.assert_close(model(IMAGES), opened(IMAGES))
            assert (card.classes, card.names[:2]) == (WORDNET, ["tabby", "espresso"])


def test_segmenter_is_embedded_with_its_head(tmp_path):
    with weights_in(tmp_path):
        run = make_run(
            tmp_path / "run",
            classes=["sky", "road"],
            task="segmentation",
            head="fpn",
            head_kwargs={"dim": 32, "branch_dim": 16},
        )
        load_tool().embed(run, "camvid", about_data=("streets", "free"))
        assert list(weights.embedded()) == ["svit_nano+fpn.camvid"]
        model = saccade.create_segmenter("svit_nano", "fpn", pretrained="camvid").eval()
        assert (model.num_classes, model(IMAGES).shape) == (2, (2, 2, 64, 64))
        opened = load("svit_nano+fpn")
        card = card_of(opened)
        torch.testing.assert_close(model(IMAGES), opened(IMAGES))
        assert card.names == ["sky", "road"]
        assert saccade.create_segmenter("svit_nano", "fpn", 5, pretrained="camvid")(IMAGES).shape[1] == 5
        with pytest.raises(ValueError, match=r"no weights svit_nano\+fpn\.ade exist; of svit_nano: svit_nano\+fpn"):
            saccade.create_segmenter("svit_nano", "fpn", pretrained="ade")


def test_pretrained_without_weights_is_an_error_that_helps(folder):
    with pytest.raises(RuntimeError, match=r"weights of paca_nano, got none\. `saccade pull --list`.*Train it"):
        saccade.create_model("paca_nano", pretrained=True)
    with pytest.raises(RuntimeError, match=r"svit_nano\.untrained"):
        timm.create_model("svit_nano.untrained", pretrained=True)


def test_card_states_data_accuracy_recipe_and_limits(folder):
    card = (folder / "svit_nano.tiny_imagenet.md").read_text()
    for text in (
        'saccade.create_model("svit_nano.tiny_imagenet", pretrained=True)',
        "non-commercial research and education",
        "top1 41.5 %",
        "`saccade train recipes/small/svit_nano_tiny_imagenet.yaml --data tiny-imagenet`: "
        "adamw, learning rate 0.001, batch 512, "
        "distilled from teacher.safetensors, 100 epochs, 8.5 minutes on a card",
        "64 px, crop 0.9, bicubic",
        "do not use it for decisions about people",
        "Classes: tabby, espresso, goldfish, crane.",
    ):
        assert text in card
    assert "/home/me" not in card
    assert read_card(folder / "svit_nano.tiny_imagenet.safetensors").preprocess.size == 64


def test_data_option_evaluates_the_half_precision_file(tmp_path):
    with weights_in(tmp_path / "weights"):
        run = make_run(tmp_path / "run", "vt_nano", Scenes(10, 64, "val").classes)
        path = load_tool().embed(run, "scenes", data="scenes")
        card = path.with_suffix(".md").read_text()
        assert "`saccade eval vt_nano.scenes --data scenes`" in card
        assert "top1 41.5" not in card


def test_size_limits_are_checked_before_writing(tmp_path, monkeypatch):
    tool = load_tool()
    with weights_in(tmp_path / "weights"):
        run = make_run(tmp_path / "run")
        monkeypatch.setattr(weights, "MAX_FILE_BYTES", 1_000_000)
        with pytest.raises(ValueError, match=r"expected at most 1 MB per file, got \d\.\d MB"):
            tool.embed(run, "tiny_imagenet")
        monkeypatch.undo()
        with weights_in(tmp_path / "weights"):
            monkeypatch.setattr(weights, "MAX_TOTAL_BYTES", 6_000_000)
            tool.embed(run, "first")
            tool.embed(run, "first")  # replaces itself
            with pytest.raises(ValueError, match="expected at most 6 MB of embedded weights"):
                tool.embed(run, "second")
            with pytest.raises(ValueError, match="letters, digits and _"):
                tool.embed(run, "../escape")
            with pytest.raises(ValueError, match=r"expected a run without model\.kwargs"):
                tool.embed(make_run(tmp_path / "other", kwargs={"projection": 64}), "third")
            assert {path.name.partition(".")[0] for path in (tmp_path / "weights").iterdir()} == {"svit_nano"}
    assert tool.main([str(tmp_path), "--tag", "x"]) == 1


def test_overflowing_tensor_stays_float32():
    tool = load_tool()
    assert tool.to_half(torch.tensor([1.0, 2.0])).dtype == torch.float16
    assert tool.to_half(torch.tensor([1.0, 1e6])).dtype == torch.float32
    assert tool.to_half(torch.tensor([3])).dtype == torch.int64


def test_damaged_file_does_not_break_the_import(tmp_path, caplog):
    (tmp_path / "svit_nano.broken.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with weights_in(tmp_path):
        assert "skipping" in caplog.text
        assert "svit_nano.broken.safetensors" in caplog.text
        assert saccade.create_model("svit_nano").num_classes == 1000


def test_wordnet_ids_are_removed_from_class_names():
    assert readable("n01443537 goldfish") == "goldfish"
    assert readable("n02123394_Persian cat") == "Persian cat"
    assert [readable(name) for name in ("n01443537", "nail", "9")] == ["n01443537", "nail", "9"]


def test_package_weights_have_cards_and_load():
    """The real folder: size limits, model cards, and every file builds its model."""
    with weights_in(SHIPPED):
        files = weights.embedded()
        assert sum(path.stat().st_size for path in files.values()) <= weights.MAX_TOTAL_BYTES
        for name, path in files.items():
            assert path.stat().st_size <= weights.MAX_FILE_BYTES
            assert path.with_suffix(".md").read_text().startswith(f"# {name}\n")
            model = load(path)
            card = card_of(model)
            assert model(torch.zeros(1, 3, 64, 64)).shape[1] == card.num_classes == len(card.classes)
            if card.task == "classification":
                tagged = timm.create_model(name, pretrained=True).eval()
                torch.testing.assert_close(tagged(IMAGES), model(IMAGES))


@pytest.mark.parametrize(
    ("photo", "labels", "top"),
    [("coffee", ("espresso",), 1), ("rocket", ("projectile",), 3), ("cat", ("cat", "tabby"), 5)],
)
@pytest.mark.parametrize("name", NANO)
def test_package_classifiers_recognise_the_photographs(name, photo, labels, top):
    """Espresso is top-1, the rocket in the top 3, the cat in the top 5, with the preprocessing of `saccade predict`."""
    with weights_in(SHIPPED), Image.open(photo_paths()[photo]) as image:
        model = timm.create_model(f"{name}.tiny_imagenet", pretrained=True).eval()
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
        with torch.inference_mode():
            best = model(transform(image.convert("RGB"))[None])[0].topk(top).indices.tolist()
    predicted = [model.pretrained_cfg["label_names"][i] for i in best]
    assert any(label in name for label in labels for name in predicted), predicted


@pytest.mark.shows("SF-53", "SF-67")
def test_classifier_weights_initialise_a_model_with_more_tokens():
    """Only the token embeddings and regions are new."""
    with weights_in(SHIPPED):
        classifier = timm.create_model("sparseformer_nano", pretrained=True).state_dict()
        more = timm.create_model("sparseformer_nano", pretrained=True, num_tokens=49)
        detector = saccade.create_detector("sparseformer_nano", "sparse", 5, True, num_tokens=49, detect_tokens=9)
    for model in (more, detector.backbone):
        state = model.state_dict()
        assert state["embeddings"].shape == (49, 128)
        shared = [key for key in state if key in classifier and key not in ("embeddings", "regions")]
        assert len(shared) == len(state.keys() & classifier.keys()) - 2
        assert all(torch.equal(state[key], classifier[key]) for key in shared)


def test_weights_page_has_the_accuracy_of_the_cards():
    page = (SHIPPED.parents[1] / "docs" / "weights.md").read_text()
    with weights_in(SHIPPED):
        files = weights.embedded()
    assert set(files) == {f"{name}.tiny_imagenet" for name in NANO} | {"paca_nano+paca.camvid"}
    for name, path in files.items():
        row = re.search(rf"^\| `{re.escape(name)}` \|.*$", page, re.MULTILINE)
        assert row, name
        accuracy = re.findall(r"\b(?:top1|top5|miou|aacc) ([\d.]+) %", path.with_suffix(".md").read_text())
        assert len(accuracy) == 2
        for value in accuracy:
            assert f" {float(value):.1f} %" in row.group(), f"{name}: {value} %"
        assert f"| {path.stat().st_size / 1e6:.1f} |" in row.group(), f"{name}: file size"


def test_tool_prints_help():
    done = subprocess.run([sys.executable, load_tool().__file__, "--help"], capture_output=True, text=True, check=True)
    assert "--tag" in done.stdout
