"""Released weights from a local server: downloaded, converted, cached; every fault is one error and leaves no file."""

import hashlib
import io
import json
import os
from functools import cache

import pytest
import timm
import torch

import saccade
from saccade.cli import main
from saccade.models.card import read_card
from saccade.models.official import sparseformer
from saccade.tasks.released import fetch_release
from saccade.weights.download import DownloadError
from saccade.weights.read import CheckpointError, read_metadata
from saccade.weights.releases import RELEASES, SPARSEFORMER, Release, find
from tests.parity import kit
from tests.weights.server import file_server

KITS = {
    "paca_tiny": "pacavit_tiny_p2cconv_100_0",
    "paca_mlp_small": "pacavit_small_p2cmlp_100_0",
    "sparseformer_tiny": "sparseformer_v1_tiny",
    "sparseformer_btsp_augreg_base": "sparseformer_btsp_augreg_base",
    "svit_small": "stvit_small",
}
NANO = Release("sparseformer_nano", "in1k", f"{SPARSEFORMER}nano.pth", 14, "12.3 top-1")  # small, hence fast


@pytest.fixture
def home(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "SACCADE_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SACCADE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def server(monkeypatch, home):
    with file_server() as server:
        monkeypatch.setenv("SACCADE_MIRROR", f"{server.address}/mirror/")
        yield server


def saved(state_dict) -> bytes:
    buffer = io.BytesIO()
    torch.save({"state_dict": state_dict, "epoch": 300}, buffer)
    return buffer.getvalue()


@cache
def official_weights(name: str) -> dict[str, torch.Tensor]:
    return kit.weights(KITS[name])


@cache
def official(name: str) -> bytes:
    return saved(official_weights(name))


@cache
def nano_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return saccade.create_model("sparseformer_nano")


@cache
def nano_file() -> bytes:
    """A SparseFormer nano under the authors' names."""
    names = kit.official_names("sparseformer_v1_tiny", lambda weights: sparseformer.convert(weights, nano_model()))
    return saved({names[ours]: value for ours, value in nano_model().state_dict().items()})


def serve(server, release: Release, data: bytes) -> None:
    server.files[release.url.rpartition("/")[2]] = data


def remaining(home) -> list[str]:
    """Files of the cache, without locks."""
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and path.suffix != ".lock")


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("sparseformer_tiny", "paca_mlp_small", "sparseformer_btsp_augreg_base")
]


@pytest.mark.parametrize("name", ["paca_tiny", *SLOW])
def test_pretrained_downloads_converts_and_caches(server, home, monkeypatch, name):
    serve(server, find(name), official(name))
    model = timm.create_model(name, pretrained=True)
    expected = saccade.convert_official(official_weights(name), name)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    path = home / "weights" / f"{name}.in1k.safetensors"
    assert remaining(home) == ["sha256.json", f"weights/{path.name}"]
    notes, release = read_metadata(path), find(name)
    digest = hashlib.sha256(official(name)).hexdigest()
    assert notes["saccade.sha256"] == digest == json.loads((home / "sha256.json").read_text())[f"{name}.in1k"]
    assert (notes["saccade.source"], notes["saccade.licence"]) == (release.url, "mit")
    assert notes.get("saccade.accuracy", "") == release.accuracy
    card = read_card(path)
    assert card.preprocess.crop_pct == (0.9 if name.startswith("paca") else 0.875)
    assert card.names[1] == "goldfish"
    monkeypatch.setenv("SACCADE_OFFLINE", "1")
    again = timm.create_model(name, pretrained=True, num_classes=5, pretrained_cfg_overlay={"crop_pct": 1.0})
    assert again.get_classifier().out_features == 5
    assert again.pretrained_cfg["crop_pct"] == 1.0
    assert len(server.requests) == 2  # a redirect and the file


def test_tag_has_options_that_the_caller_overrides():
    def clusters(name, **options):
        model = timm.create_model(name, **options)
        assert model.pretrained_cfg["tag"] == name.partition(".")[2]
        blocks = [stage.blocks[-1].tokenizer for stage in model.stages]
        return [block.clustering.to_score.out_features if hasattr(block, "clustering") else 0 for block in blocks]

    with torch.device("meta"):
        assert clusters("paca_small.in1k_blockwise") == [100, 100, 100, 100]
        assert clusters("paca_small.in1k_blockwise", clusters=(7, 7, 7, 0)) == [7, 7, 7, 0]
        shared = timm.create_model("paca_small.in1k_c49_100")
    assert shared.stages[3].blocks[0].tokenizer.clustering.to_score.out_features == 100


def test_interrupted_download_continues(server, home):
    data = nano_file()
    serve(server, NANO, data)
    server.stop_after = len(data) // 2
    with pytest.raises(DownloadError, match=r"sparseformer_nano.in1k: .* MB have arrived; run again to continue"):
        fetch_release(NANO)
    assert remaining(home) == ["downloads/nano.pth.partial"]
    assert (home / "downloads/nano.pth.partial").stat().st_size == len(data) // 2
    server.stop_after = None
    path = fetch_release(NANO)
    assert server.requests[-1] == f"bytes={len(data) // 2}-"
    assert remaining(home) == CONVERTED
    model = saccade.create_model("sparseformer_nano")
    assert saccade.load_checkpoint(model, path).new == {}
    for key, value in nano_model().state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize("fault", ["no ranges", "too long"])
def test_partial_file_that_cannot_be_continued_is_replaced(server, home, fault):
    serve(server, NANO, nano_file())
    server.ranges = fault != "no ranges"
    (home / "downloads").mkdir(parents=True)
    size = 10 if fault == "no ranges" else len(nano_file()) + 1
    (home / "downloads/nano.pth.partial").write_bytes(b"x" * size)
    fetch_release(NANO)
    assert remaining(home) == CONVERTED


class Code:
    """A pickle that would run a command."""

    def __reduce__(self):
        return os.system, ("touch executed",)


CONVERTED = ["sha256.json", "weights/sparseformer_nano.in1k.safetensors"]
SMALL = saved({"initial_roi.weight": torch.ones(36, 4)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SMALL[: len(SMALL) // 2], "damaged or incomplete"),
        (SMALL, "the checkpoint lacks embeddings"),
        (saved(Code()), "could run code"),
        (b"\n <!DOCTYPE html><html>Sign in</html>", "expected a file from .* got a web page"),
        (b"", "damaged or incomplete|not a checkpoint"),
        (None, "HTTP 404"),
    ],
)
def test_bad_file_is_one_error_and_leaves_nothing(server, home, monkeypatch, tmp_path, data, message):
    monkeypatch.chdir(tmp_path)
    if data is not None:
        serve(server, NANO, data)
    with pytest.raises((CheckpointError, DownloadError), match=message) as caught:
        fetch_release(NANO)
    assert "sparseformer_nano.in1k" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert remaining(home) == []
    assert not (tmp_path / "executed").exists()


def test_file_of_another_number_of_tokens_is_refused(server, home):
    serve(server, NANO, nano_file())
    with pytest.raises(CheckpointError, match=r"nano.in1k: the file has no values for embeddings, regions"):
        fetch_release(NANO._replace(options={"num_tokens": 9}))
    assert remaining(home) == []


def test_changed_file_is_refused(server, home):
    home.mkdir()
    (home / "sha256.json").write_text(json.dumps({NANO.name: "0" * 64}))
    serve(server, NANO, nano_file())
    with pytest.raises(DownloadError, match=r"expected SHA-256 0{64}, as on first use, got [0-9a-f]{64}"):
        fetch_release(NANO)
    assert remaining(home) == ["sha256.json"]


def test_no_network_is_one_line_that_says_what_to_do(home, monkeypatch):
    with file_server() as server:
        monkeypatch.setenv("SACCADE_MIRROR", server.address)
    with pytest.raises(DownloadError, match=r"no connection .* run `saccade pull sparseformer_tiny.in1k --from FILE`"):
        timm.create_model("sparseformer_tiny", pretrained=True)
    monkeypatch.setenv("SACCADE_OFFLINE", "1")
    with pytest.raises(DownloadError, match="SACCADE_OFFLINE or HF_HUB_OFFLINE forbids downloads"):
        timm.create_model("sparseformer_tiny", pretrained=True)
    assert remaining(home) == []


def test_file_without_licence_is_downloaded_by_hand(home):
    message = r"Download it from https://drive.google.com/.* then run `saccade pull svit_small.in1k --from FILE`"
    with pytest.raises(DownloadError, match=message):
        timm.create_model("svit_small", pretrained=True)
    assert remaining(home) == []


@pytest.mark.slow
def test_file_downloaded_by_hand_is_converted(home, tmp_path, capsys):
    torch.save({"model": official_weights("svit_small")}, tmp_path / "svit.pth")
    assert main(["pull", "svit_small", "--from", str(tmp_path / "svit.pth")]) == 0
    assert "svit_small.in1k.safetensors" in capsys.readouterr().out
    model = timm.create_model("svit_small", pretrained=True)
    assert read_metadata(home / "weights/svit_small.in1k.safetensors")["saccade.licence"] == "none given"
    expected = saccade.convert_official(official_weights("svit_small"), "svit_small")
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_list_of_releases_is_complete():
    """The published tables: 22 classifiers and embeddings, 12 Mask R-CNNs, 15 segmenters."""
    heads = [release.head for release in RELEASES]
    assert (heads.count(""), heads.count("mask_rcnn"), heads.count("paca") + heads.count("upernet")) == (22, 12, 15)
    assert len({release.name for release in RELEASES}) == len(RELEASES) == 49
    files = [release.url for release in RELEASES if not release.by_hand]
    assert len(set(files)) == len(files) == 46
    assert {release.backbone for release in RELEASES} <= set(saccade.list_models())
    assert all(timm.models.get_pretrained_cfg(r.name).tag == r.tag for r in RELEASES if not r.head)


def test_pull_lists_what_is_cached(server, home, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("saccade.weights.releases.RELEASES", (NANO, *RELEASES))
    serve(server, NANO, nano_file())
    assert main(["pull", "sparseformer_nano", "--to", str(tmp_path / "to")]) == 0
    assert remaining(tmp_path / "to") == ["sparseformer_nano.in1k.safetensors"]
    assert remaining(home) == ["sha256.json"]
    capsys.readouterr()
    assert main(["pull", "sparseformer_nano", "paca_tiny", "--json"]) == 1  # the server has one of them
    first, second = json.loads(capsys.readouterr().out)
    assert first["path"] == str(home / CONVERTED[1])
    assert "HTTP 404" in second["error"]
    assert main(["pull", "--list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert [name for name, row in rows.items() if row["cached"]] == [NANO.name]
    assert rows["paca_tiny.in1k"]["accuracy"] == "80.9 top-1"
    assert rows["svit_base.in1k"]["by_hand"]
    assert len(rows) == 50
    assert main(["pull", "--list"]) == 0
    assert "46.4/41.8 AP" in capsys.readouterr().out
    assert main(["pull", "swin_tiny"]) == 2
    assert "expected a released model, got 'swin_tiny'" in capsys.readouterr().err
