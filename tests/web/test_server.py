"""The HTTP API: results, errors, and no access to files of the host."""

import io
import json
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="the page needs the web extra: pip install 'saccade[web]'")
import httpx

import saccade
from saccade.data.synthetic.photos import photo_paths
from saccade.explanation.inspection import mosaic_image, summarize, summarize_token, token_at, token_image
from saccade.web.service import above


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def post(http, endpoint, path, **parameters):
    """Send a file; return the data, or the image of the response."""
    response = http.post(
        f"api/{endpoint}", params={"name": Path(path).name} | parameters, content=Path(path).read_bytes()
    )
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "image/png":
        return np.array(Image.open(io.BytesIO(response.content)).convert("RGB"))
    return response.json()


def upload(http, path):
    with open(path, "rb") as file:
        return http.post("gradio_api/upload", files={"files": (Path(path).name, file)})


def test_health_and_models(http, service):
    for path in ("health", "api/health"):
        assert http.get(path).json() == {"status": "ok", "version": saccade.__version__, "models": 5}
    models = {model["name"]: model for model in http.get("api/models").json()}
    assert list(models) == list(service.catalogue.entries)
    assert models["motions"] == {
        "name": "motions", "task": "video", "trained": True, "knows": "2 classes of motions, 91 % top-1"
    }  # fmt: skip
    assert models["svit_nano"]["trained"] is False


def test_predict_returns_the_result_of_every_task(http, service, images, video):
    path = str(images[0])
    assert (
        post(http, "predict", path, model="svit_nano")["classes"]
        == service.predict(path, "svit_nano").to_dict()["classes"]
    )
    areas = post(http, "predict", path, model="streets")
    assert areas["size"] == [80, 64]
    assert sum(row["share"] for row in areas["classes"]) == pytest.approx(1, abs=1e-4)
    detections = service.predict(path, "shapes")
    threshold = float(detections.scores.median())
    objects = post(http, "predict", path, model="shapes", threshold=threshold)["objects"]
    assert objects == above(detections, threshold).to_dict()["objects"]
    assert 0 < len(objects) < len(detections)
    clip = post(http, "predict", video, model="motions")
    assert (clip["image"], clip["frames"], len(clip["classes"])) == ("clip.mp4", 8, 2)


def test_tokens_mosaic_token_and_map(http, service, images):
    path = str(images[1])
    inspection = service.inspect(path, "svit_nano")
    assert post(http, "tokens", path, model="svit_nano") == summarize(inspection)
    place = {"model": "svit_nano", "stage": 1, "x": 0.2, "y": 0.8}
    token = token_at(inspection, 1, 0.2, 0.8)
    assert post(http, "token", path, **place) == summarize_token(inspection, 1, token)
    np.testing.assert_array_equal(post(http, "map", path, **place), token_image(inspection, 1, token))
    mosaic = post(http, "mosaic", path, model="svit_nano", stage=1, opacity=0.5)
    np.testing.assert_array_equal(mosaic, mosaic_image(inspection, 1, 0.5))
    drawn = post(http, "draw", path, model="streets")
    np.testing.assert_array_equal(drawn, np.array(service.predict(path, "streets").draw()))


def test_schema_lists_endpoints_and_keys(http):
    schema = http.get("api/openapi.json").json()
    assert sorted(schema["paths"]) == [
        "/draw",
        "/health",
        "/map",
        "/models",
        "/mosaic",
        "/predict",
        "/token",
        "/tokens",
    ]
    for path in ("/predict", "/mosaic"):
        operation = schema["paths"][path]["post"]
        assert "application/octet-stream" in operation["requestBody"]["content"]
        assert "model" in [parameter["name"] for parameter in operation["parameters"] if parameter["required"]]
    keys = schema["components"]["schemas"]["Tokens"]["properties"]
    assert {"predictions", "stages", "doubt"} <= keys.keys()
    documented = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    for path in schema["paths"]:
        assert f"`/api{path}`" in documented or path == "/health"


@pytest.mark.parametrize(
    ("name", "content", "model", "message"),
    [
        ("notes.txt", b"hello", "svit_nano", r"^notes\.txt is not an image\."),
        ("random.jpg", bytes(range(256)) * 20, "svit_nano", r"^random\.jpg is not an image\."),
        ("clip.mp4", bytes(range(256)) * 20, "motions", r"^clip\.mp4 is not a video"),
        ("empty.png", b"", "streets", r"^empty\.png is empty"),
        ("cat.jpg", b"hello", "resnet50", "^unknown model 'resnet50'"),
    ],
)
def test_errors_are_messages(http, name, content, model, message):
    response = http.post("api/predict", params={"model": model, "name": name}, content=content)
    assert response.status_code == 400
    assert re.search(message, response.json()["detail"])


def test_invalid_parameters_are_rejected(http, images):
    assert http.post("api/predict", content=b"").status_code == 422  # no model
    response = http.post("api/token", params={"model": "svit_nano", "x": 2}, content=images[0].read_bytes())
    assert response.status_code == 422
    assert "less than or equal to 1" in response.text


def test_large_upload_is_rejected_and_deleted(http, service):
    response = http.post("api/predict", params={"model": "svit_nano"}, content=b"\0" * 11_000_000)
    assert response.status_code == 413
    assert "at most 10 MB" in response.text
    assert not list(service.folder.rglob("upload"))


@pytest.mark.parametrize("name", ["../../outside.png", "/tmp/outside.png", "..", "a\\b.png", "x" * 300])
def test_name_of_an_upload_cannot_leave_its_folder(http, images, name):
    parameters = {"model": "streets", "name": name}
    response = http.post("api/predict", params=parameters, content=images[0].read_bytes())
    assert response.status_code == 422


def test_large_upload_of_the_page_is_rejected(http, tmp_path):
    (tmp_path / "large.jpg").write_bytes(b"\0" * 11_000_000)
    assert upload(http, tmp_path / "large.jpg").status_code == 413


PACKAGE = Path(saccade.__file__).parent


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../../etc/passwd",
        "../../../../../../../../etc/passwd",
        "..%2f..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/proc/self/environ",
        "file:///etc/passwd",
        str(PACKAGE / "__init__.py"),
        str(PACKAGE / "data/photos/LICENSES.md"),
        str(PACKAGE / "web/server.py"),
        "pyproject.toml",
        str(Path.cwd() / "pyproject.toml"),
    ],
)
def test_host_files_cannot_be_fetched(http, path):
    for route in ("gradio_api/file=", "file=", "gradio_api/file/", "static/", "assets/", "theme.css/../", "api/"):
        for form in (path, quote(path, safe="")):
            response = http.get(route + form)
            assert b"root:" not in response.content
            assert b"saccade:" not in response.content
            assert b"[build-system]" not in response.content
            if route == "gradio_api/file=":
                assert response.status_code in (403, 404), path


def test_proxy_route_rejects_private_addresses(http):
    """Gradio's route for remote files does not fetch from this machine or its network."""
    for address in ("127.0.0.1:9", "localhost:9", "169.254.169.254/latest", "10.0.0.1"):
        assert http.get(f"gradio_api/file=http://{address}").status_code >= 400


def test_events_of_the_page_are_not_an_api(http, service):
    """The page's own events cannot be called with the path of a file on the server."""
    outside = service.folder / "outside.png"
    Image.new("RGB", (64, 64)).save(outside)
    config = http.get("config").json()
    assert config["dependencies"]
    assert all(entry["api_visibility"] == "private" for entry in config["dependencies"])
    show = next(entry["id"] for entry in config["dependencies"] if entry["api_name"] == "show")
    for path in ("/etc/passwd", str(outside), str(photo_paths()["cat"]), "../../../etc/passwd"):
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        body = {"data": [file, "svit_nano", 1], "fn_index": show, "session_hash": "test"}
        http.post("gradio_api/queue/join", json=body)
        with http.stream("GET", "gradio_api/queue/data", params={"session_hash": "test"}) as stream:
            done = next(line for line in stream.iter_lines() if "process_completed" in line or "unexpected" in line)
        assert not json.loads(done.removeprefix("data: ")).get("success")


def test_server_binds_to_localhost(server):
    assert server.url.startswith("http://127.0.0.1:")
    assert server.page.share is False


def test_page_uses_no_remote_fonts(http):
    assert "fonts.googleapis" not in http.get("").text
    assert "fonts.googleapis" not in http.get("theme.css").text


def test_results_of_many_clients_are_not_mixed_up(http, service, images):
    """A small load; tests/web/test_load.py is the large one."""
    expected = [summarize(service.inspect(str(path), "vt_nano"))["predictions"] for path in images[:12]]
    service.cache.clear()
    indices = [n % 12 for n in range(24)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda n: post(http, "tokens", images[n], model="vt_nano"), indices))
    assert [result["predictions"] for result in results] == [expected[n] for n in indices]
    assert [result["image"] for result in results] == [images[n].name for n in indices]


def test_requests_beyond_the_queue_are_rejected(service, images, monkeypatch):
    from fastapi.testclient import TestClient

    from saccade.web.api import make_api

    entered, released, inspect = threading.Event(), threading.Event(), service.inspect

    def wait(path, model):
        entered.set()
        assert released.wait(30)
        return inspect(path, model)

    monkeypatch.setattr(service, "inspect", wait)
    api, request = (
        make_api(service, queue_size=1),
        {"params": {"model": "svit_nano"}, "content": images[5].read_bytes()},
    )
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(TestClient(api).post, "/tokens", **request)
        assert entered.wait(30)
        second = TestClient(api).post("/tokens", **request)
        released.set()
        assert first.result().status_code == 200
    assert second.status_code == 503
    assert "1 requests are waiting" in second.json()["detail"]
    assert TestClient(api).post("/tokens", **request).status_code == 200


def code_block(language: str) -> str:
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    (block,) = (text for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if "127.0.0.1:7860/" in text)
    return block


def test_documented_python_example_runs(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(photo_paths()["cat"], "photo.jpg")
    exec(code_block("python").replace("http://127.0.0.1:7860/", server.url), {})
    assert "16 tokens for 256 pixels" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_documented_curl_example_runs(server, tmp_path):
    shutil.copy(photo_paths()["cat"], tmp_path / "photo.jpg")
    script = code_block("bash").replace("http://127.0.0.1:7860/", server.url)
    out = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert '"status":"ok"' in out
    assert '"probability"' in out
    assert Image.open(tmp_path / "mosaic.png").format == "PNG"
