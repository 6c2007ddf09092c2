"""200 requests from 16 clients, with another that disconnects: complete, not mixed up, in bounded memory."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the page needs the web extra: pip install 'saccade[web]'")
import httpx

from saccade.explanation.inspection import summarize
from saccade.web.catalogue import Catalogue
from saccade.web.service import MAX_CACHED, Service
from tests.web.conftest import make_image
from tests.weights.folder import SHIPPED, weights_in

REQUESTS, CLIENTS, IMAGES = 200, 16, 40  # more images than cached results: most requests run the model
MAX_GROWTH = 400  # megabytes after warm-up


@pytest.fixture
def process():
    """`saccade serve` as a subprocess: its JSON output and process id."""
    command = [sys.executable, "-m", "saccade.cli", "serve", "--model", "svit_nano", "--json", "--device", "cpu"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = ""
    assert started.stdout is not None
    while not lines.rstrip().endswith("\n}"):
        line = started.stdout.readline()
        assert line, "the server exited before it was ready"
        lines += line
    yield json.loads(lines), started.pid
    started.terminate()
    started.wait(20)


def megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads memory from /proc")
def test_concurrent_requests_get_their_own_results(process, tmp_path):
    output, pid = process
    assert IMAGES > MAX_CACHED
    paths = [make_image(tmp_path / f"image-{number}.png", number) for number in range(IMAGES)]
    with weights_in(SHIPPED):  # as in the server process
        direct = Service(Catalogue(models=["svit_nano"]), folder=str(tmp_path / "direct"))
        expected = [summarize(direct.inspect(str(path), "svit_nano")) for path in paths]
    http = httpx.Client(base_url=output["url"], timeout=120)

    def request(number: int):
        index = number % IMAGES
        parameters = {"model": "svit_nano", "name": paths[index].name}
        response = http.post("api/tokens", params=parameters, content=paths[index].read_bytes())
        return index, response.json()

    def disconnect(url: str):
        """Send requests and disconnect without reading the results."""
        with httpx.Client(base_url=url, timeout=60) as client:
            for path in paths[:20]:
                parameters = {"model": "svit_nano"}
                with client.stream("POST", "api/tokens", params=parameters, content=path.read_bytes()):
                    pass

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        list(pool.map(request, range(CLIENTS)))  # warm
        warm, start = megabytes(pid), time.perf_counter()
        disconnecting = pool.submit(disconnect, output["url"])
        results = list(pool.map(request, range(REQUESTS)))
        disconnecting.result()
    seconds, grown = time.perf_counter() - start, megabytes(pid) - warm
    print(f"\n{REQUESTS} requests from {CLIENTS} clients in {seconds:.1f} s; memory {warm:.0f} MB + {grown:.0f} MB")
    assert len(results) == REQUESTS
    for index, result in results:
        assert result["image"] == paths[index].name
        for row, direct_row in zip(result["predictions"], expected[index]["predictions"], strict=True):
            assert row["class"] == direct_row["class"]
            assert row["probability"] == pytest.approx(direct_row["probability"], rel=1e-3)
        assert result["stages"][0]["title"] == expected[index]["stages"][0]["title"]
    assert grown < MAX_GROWTH
