"""The page's doors over HTTP: answers, refusals, and no way to the host's files."""

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
from saccade.web.look import facts, mosaic_picture, token_at, token_facts


@pytest.fixture(scope="module")
def client(running):
    return Client(running.url, verbose=False)


def raw(running, **options):
    return httpx.Client(base_url=running.url, timeout=60, **options)


def upload(http, path):
    with open(path, "rb") as file:
        return http.post("gradio_api/upload", files={"files": (Path(path).name, file)})


def call(http, name, *data):
    """curl's way: ask, then listen; gives the last event and its data."""
    event = http.post(f"gradio_api/call/{name}", json={"data": list(data)}).json()["event_id"]
    lines = http.get(f"gradio_api/call/{name}/{event}").text.strip().splitlines()
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    said = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return kinds[-1], json.loads(said[-1])


def sent(path):
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def test_look_answers_what_the_model_does(client, service, pictures):
    told = client.predict(handle_file(str(pictures[0])), "svit_nano", api_name="/look")
    direct = facts(service.look(str(pictures[0]), "svit_nano"))
    assert told["answers"] == direct["answers"]
    assert told["stages"] == direct["stages"]
    assert told["trained"] is False


def test_mosaic_and_token_are_pictures(client, service, pictures):
    look = service.look(str(pictures[1]), "svit_nano")
    drawn = client.predict(handle_file(str(pictures[1])), "svit_nano", 1, 0.5, api_name="/mosaic")
    np.testing.assert_array_equal(np.array(Image.open(drawn).convert("RGB")), mosaic_picture(look, 1, 0.5))
    path, told = client.predict(handle_file(str(pictures[1])), "svit_nano", 1, 0.2, 0.8, api_name="/token")
    assert told == token_facts(look, 1, token_at(look, 1, 0.2, 0.8))
    assert Image.open(path).size == look.picture.shape[1::-1]


def test_segment_gives_areas(client, pictures):
    path, told = client.predict(handle_file(str(pictures[2])), "streets", 0.5, api_name="/segment")
    assert Image.open(path).size == (80, 64)
    assert sum(row["share"] for row in told["areas"]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("opacity", [(), (1,), (0,)])
def test_segment_takes_whole_numbers_and_has_a_default(client, service, pictures, opacity):
    path, _ = client.predict(handle_file(str(pictures[2])), "streets", *opacity, api_name="/segment")
    wanted = service.segment(str(pictures[2]), "streets").draw(float(*opacity or (1,)))
    np.testing.assert_array_equal(np.array(Image.open(path).convert("RGB")), wanted)


def test_the_same_with_curls_requests(running, service, pictures):
    with raw(running) as http:
        (path,) = upload(http, pictures[3]).json()
        kind, data = call(http, "look", sent(path), "vt_nano")
    assert kind == "complete"
    assert data[0]["answers"] == facts(service.look(str(pictures[3]), "vt_nano"))["answers"]


def test_only_the_four_doors_are_told(client):
    named = client.view_api(return_format="dict")["named_endpoints"]
    assert sorted(named) == ["/look", "/mosaic", "/segment", "/token"]


def test_refusals_are_clear(client, tmp_path, pictures):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(AppError, match=r"notes\.txt is not a picture"):
        client.predict(handle_file(str(tmp_path / "notes.txt")), "svit_nano", api_name="/look")
    with pytest.raises(AppError, match="there is no model 'resnet50' here"):
        client.predict(handle_file(str(pictures[0])), "resnet50", api_name="/look")
    Image.new("1", (30_000, 20_000)).save(tmp_path / "bomb.png")
    with pytest.raises(AppError, match="far too many pixels"):
        client.predict(handle_file(str(tmp_path / "bomb.png")), "svit_nano", api_name="/look")


def test_an_upload_beyond_the_limit_is_refused(running, tmp_path):
    (tmp_path / "large.jpg").write_bytes(b"\0" * 11_000_000)
    with raw(running) as http:
        answer = upload(http, tmp_path / "large.jpg")
    assert answer.status_code == 413


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
        str(PACKAGE / "data/synthetic/photos/LICENSES.md"),
        str(PACKAGE / "web/server.py"),
        "pyproject.toml",
        str(Path.cwd() / "pyproject.toml"),
    ],
)
def test_no_file_of_the_host_can_be_fetched(running, path):
    with raw(running) as http:
        for door in ("gradio_api/file=", "file=", "gradio_api/file/", "static/", "assets/", "theme.css/../"):
            for form in (path, quote(path, safe="")):
                answer = http.get(door + form)
                assert b"root:" not in answer.content
                assert b"saccade:" not in answer.content
                assert b"[build-system]" not in answer.content
                if door == "gradio_api/file=":
                    assert answer.status_code in (403, 404), path


def test_no_file_of_the_host_can_be_used_as_an_upload(running, service):
    """A request that names a path of the server, not of an upload, is refused, also for a real picture."""
    outside = service.folder / "outside.png"  # beside the uploads, not among them
    Image.new("RGB", (64, 64)).save(outside)
    with raw(running) as http:
        for path in ("/etc/passwd", str(outside), str(photo_paths()["cat"]), "../../../etc/passwd"):
            kind, _ = call(http, "look", sent(path), "svit_nano")
            assert kind == "error", path
            kind, _ = call(http, "look", {"path": path, "url": f"file://{path}", **sent(path)}, "svit_nano")
            assert kind == "error", path


def test_it_does_not_fetch_from_its_own_network(running):
    """The route that passes on public pictures refuses addresses of this machine and network."""
    with raw(running) as http:
        for address in ("127.0.0.1:9", "localhost:9", "169.254.169.254/latest", "10.0.0.1"):
            assert http.get(f"gradio_api/file=http://{address}").status_code >= 400


def test_it_listens_on_this_machine_alone(running):
    assert running.url.startswith("http://127.0.0.1:")
    assert running.page.share is False


def test_nothing_is_fetched_from_elsewhere(running):
    """Fonts and styles are local."""
    with raw(running) as http:
        assert "fonts.googleapis" not in http.get("").text
        assert "fonts.googleapis" not in http.get("theme.css").text


def test_a_client_that_goes_away_harms_no_one(running, service, pictures):
    with raw(running) as http:
        (path,) = upload(http, pictures[4]).json()
        for _ in range(8):
            event = http.post("gradio_api/call/look", json={"data": [sent(path), "svit_nano"]}).json()["event_id"]
            with http.stream("GET", f"gradio_api/call/look/{event}"):
                pass  # gone before the answer
        http.post("gradio_api/call/look", json={"data": [sent(path), "svit_nano"]})  # and one that never listens
        kind, data = call(http, "look", sent(path), "svit_nano")
    assert kind == "complete"
    assert data[0]["answers"] == facts(service.look(str(pictures[4]), "svit_nano"))["answers"]
    assert not service.turn.locked()


def test_answers_of_many_clients_are_not_mixed_up(running, service, pictures):
    """A small load; tests/web/test_load.py has the large one."""
    expected = [facts(service.look(str(path), "vt_nano"))["answers"] for path in pictures[:12]]
    service.memory.clear()
    mine = threading.local()

    def ask(number: int):
        if not hasattr(mine, "client"):
            mine.client = Client(running.url, verbose=False)
        return mine.client.predict(handle_file(str(pictures[number])), "vt_nano", api_name="/look")

    numbers = [n % 12 for n in range(24)]
    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(ask, numbers))
    assert [one["answers"] for one in told] == [expected[n] for n in numbers]
    assert [one["picture"] for one in told] == [pictures[n].name for n in numbers]


def examples(language: str) -> str:
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    (found,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return found


def test_the_documented_python_example_works(running, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(photo_paths()["cat"], "photo.jpg")
    exec(examples("python").replace("http://127.0.0.1:7860", running.url), {})
    assert "tokens for 240 pixels" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl on this machine")
def test_the_documented_curl_example_works(running, tmp_path):
    shutil.copy(photo_paths()["cat"], tmp_path / "photo.jpg")
    script = examples("bash").replace("http://127.0.0.1:7860/", running.url)
    told = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "event: complete" in told
    assert '"answers"' in told
