"""The HTTP API: results, errors, and no access to files of the host."""

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
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

import saccade
from saccade.data.synthetic.photos import photo_paths
from saccade.web.inspection import mosaic_image, summarize, summarize_token, token_at


@pytest.fixture(scope="module")
def client(server):
    return Client(server.url, verbose=False)


def raw(server, **options):
    return httpx.Client(base_url=server.url, timeout=60, **options)


def upload(http, path):
    with open(path, "rb") as file:
        return http.post("gradio_api/upload", files={"files": (Path(path).name, file)})


def call(http, name, *data):
    """Post a request and read its event stream, as with curl; return the last event and its data."""
    event = http.post(f"gradio_api/call/{name}", json={"data": list(data)}).json()["event_id"]
    lines = http.get(f"gradio_api/call/{name}/{event}").text.strip().splitlines()
    events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    payloads = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return events[-1], json.loads(payloads[-1])


def file_data(path):
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def test_inspect_returns_predictions_and_stages(client, service, images):
    result = client.predict(handle_file(str(images[0])), "svit_nano", api_name="/inspect")
    direct = summarize(service.inspect(str(images[0]), "svit_nano"))
    assert result["predictions"] == direct["predictions"]
    assert result["stages"] == direct["stages"]
    assert result["trained"] is False


def test_mosaic_and_token_return_images(client, service, images):
    inspection = service.inspect(str(images[1]), "svit_nano")
    drawn = client.predict(handle_file(str(images[1])), "svit_nano", 1, 0.5, api_name="/mosaic")
    np.testing.assert_array_equal(np.array(Image.open(drawn).convert("RGB")), mosaic_image(inspection, 1, 0.5))
    path, result = client.predict(handle_file(str(images[1])), "svit_nano", 1, 0.2, 0.8, api_name="/token")
    assert result == summarize_token(inspection, 1, token_at(inspection, 1, 0.2, 0.8))
    assert Image.open(path).size == inspection.image.shape[1::-1]


def test_segment_returns_areas(client, images):
    path, result = client.predict(handle_file(str(images[2])), "streets", 0.5, api_name="/segment")
    assert Image.open(path).size == (80, 64)
    assert sum(row["share"] for row in result["areas"]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("opacity", [(), (1,), (0,)])
def test_segment_opacity_accepts_integers_and_has_a_default(client, service, images, opacity):
    path, _ = client.predict(handle_file(str(images[2])), "streets", *opacity, api_name="/segment")
    expected = service.segment(str(images[2]), "streets").draw(float(*opacity or (1,)))
    np.testing.assert_array_equal(np.array(Image.open(path).convert("RGB")), expected)


def test_inspect_over_plain_http(server, service, images):
    with raw(server) as http:
        (path,) = upload(http, images[3]).json()
        event, data = call(http, "inspect", file_data(path), "vt_nano")
    assert event == "complete"
    assert data[0]["predictions"] == summarize(service.inspect(str(images[3]), "vt_nano"))["predictions"]


def test_api_lists_exactly_four_endpoints(client):
    named = client.view_api(return_format="dict")["named_endpoints"]
    assert sorted(named) == ["/inspect", "/mosaic", "/segment", "/token"]


def test_errors_reach_the_client(client, tmp_path, images):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(AppError, match=r"notes\.txt is not an image"):
        client.predict(handle_file(str(tmp_path / "notes.txt")), "svit_nano", api_name="/inspect")
    with pytest.raises(AppError, match="unknown model 'resnet50'"):
        client.predict(handle_file(str(images[0])), "resnet50", api_name="/inspect")
    Image.new("1", (30_000, 20_000)).save(tmp_path / "bomb.png")
    with pytest.raises(AppError, match="too many pixels"):
        client.predict(handle_file(str(tmp_path / "bomb.png")), "svit_nano", api_name="/inspect")


def test_large_upload_is_rejected(server, tmp_path):
    (tmp_path / "large.jpg").write_bytes(b"\0" * 11_000_000)
    with raw(server) as http:
        response = upload(http, tmp_path / "large.jpg")
    assert response.status_code == 413


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
def test_host_files_cannot_be_fetched(server, path):
    with raw(server) as http:
        for route in ("gradio_api/file=", "file=", "gradio_api/file/", "static/", "assets/", "theme.css/../"):
            for form in (path, quote(path, safe="")):
                response = http.get(route + form)
                assert b"root:" not in response.content
                assert b"saccade:" not in response.content
                assert b"[build-system]" not in response.content
                if route == "gradio_api/file=":
                    assert response.status_code in (403, 404), path


def test_host_files_cannot_be_used_as_uploads(server, service):
    """A path on the server that is not an upload is rejected, even if it is an image."""
    outside = service.folder / "outside.png"  # next to the uploads folder
    Image.new("RGB", (64, 64)).save(outside)
    with raw(server) as http:
        for path in ("/etc/passwd", str(outside), str(photo_paths()["cat"]), "../../../etc/passwd"):
            event, _ = call(http, "inspect", file_data(path), "svit_nano")
            assert event == "error", path
            event, _ = call(http, "inspect", {"path": path, "url": f"file://{path}", **file_data(path)}, "svit_nano")
            assert event == "error", path


def test_proxy_route_rejects_private_addresses(server):
    """Gradio's route for remote files does not fetch from this machine or its network."""
    with raw(server) as http:
        for address in ("127.0.0.1:9", "localhost:9", "169.254.169.254/latest", "10.0.0.1"):
            assert http.get(f"gradio_api/file=http://{address}").status_code >= 400


def test_server_binds_to_localhost(server):
    assert server.url.startswith("http://127.0.0.1:")
    assert server.page.share is False


def test_page_uses_no_remote_fonts(server):
    with raw(server) as http:
        assert "fonts.googleapis" not in http.get("").text
        assert "fonts.googleapis" not in http.get("theme.css").text


def test_disconnected_client_does_not_block_the_model(server, service, images):
    with raw(server) as http:
        (path,) = upload(http, images[4]).json()
        for _ in range(8):
            event = http.post("gradio_api/call/inspect", json={"data": [file_data(path), "svit_nano"]}).json()[
                "event_id"
            ]
            with http.stream("GET", f"gradio_api/call/inspect/{event}"):
                pass  # disconnect before the result
        http.post(
            "gradio_api/call/inspect", json={"data": [file_data(path), "svit_nano"]}
        )  # never read the result of this one
        event, data = call(http, "inspect", file_data(path), "svit_nano")
    assert event == "complete"
    assert data[0]["predictions"] == summarize(service.inspect(str(images[4]), "svit_nano"))["predictions"]
    assert not service.model_lock.locked()


def test_results_of_many_clients_are_not_mixed_up(server, service, images):
    """A small load; tests/web/test_load.py is the large one."""
    expected = [summarize(service.inspect(str(path), "vt_nano"))["predictions"] for path in images[:12]]
    service.cache.clear()
    local = threading.local()

    def request(number: int):
        if not hasattr(local, "client"):
            local.client = Client(server.url, verbose=False)
        return local.client.predict(handle_file(str(images[number])), "vt_nano", api_name="/inspect")

    indices = [n % 12 for n in range(24)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(request, indices))
    assert [result["predictions"] for result in results] == [expected[n] for n in indices]
    assert [result["image"] for result in results] == [images[n].name for n in indices]


def code_block(language: str) -> str:
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    (block,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return block


def test_documented_python_example_runs(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(photo_paths()["cat"], "photo.jpg")
    exec(code_block("python").replace("http://127.0.0.1:7860", server.url), {})
    assert "tokens for 240 pixels" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_documented_curl_example_runs(server, tmp_path):
    shutil.copy(photo_paths()["cat"], tmp_path / "photo.jpg")
    script = code_block("bash").replace("http://127.0.0.1:7860/", server.url)
    out = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "event: complete" in out
    assert '"predictions"' in out
