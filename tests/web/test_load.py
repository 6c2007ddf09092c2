"""Two hundred requests from sixteen clients, one of which leaves: none lost, none mixed up, memory bounded."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the page needs the web extra: pip install 'saccade[web]'")
import httpx
from gradio_client import Client, handle_file

from saccade.web.catalogue import Catalogue
from saccade.web.look import facts
from saccade.web.service import KEPT, Service
from tests.web.conftest import make_picture
from tests.weights.folder import SHIPPED, weights_in

REQUESTS, CLIENTS, PICTURES = 200, 16, 40  # more pictures than are remembered: most looks are real ones
GROWTH = 400  # megabytes between a warm server and the end


@pytest.fixture
def server():
    """`saccade serve` as a process of its own: (its first line of JSON, its id)."""
    command = [sys.executable, "-m", "saccade.cli", "serve", "--model", "svit_nano", "--json", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = ""
    assert process.stdout is not None
    while not lines.rstrip().endswith("\n}"):
        line = process.stdout.readline()
        assert line, "the server ended before it listened"
        lines += line
    yield json.loads(lines), process.pid
    process.terminate()
    process.wait(20)


def megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads memory from /proc")
def test_two_hundred_requests_from_sixteen_clients(server, tmp_path):
    told, pid = server
    assert PICTURES > KEPT
    paths = [make_picture(tmp_path / f"picture-{number}.png", number) for number in range(PICTURES)]
    with weights_in(SHIPPED):  # as the server's own process has it
        direct = Service(Catalogue(models=["svit_nano"]), folder=str(tmp_path / "direct"))
        expected = [facts(direct.look(str(path), "svit_nano")) for path in paths]
    mine = threading.local()

    def ask(number: int):
        if not hasattr(mine, "client"):
            mine.client = Client(told["url"], verbose=False)
        which = number % PICTURES
        return which, mine.client.predict(handle_file(str(paths[which])), "svit_nano", api_name="/look")

    def leave(url: str):
        """A client that asks and goes, again and again."""
        with httpx.Client(base_url=url, timeout=60) as http:
            for path in paths[:20]:
                with open(path, "rb") as file:
                    (kept,) = http.post("gradio_api/upload", files={"files": (path.name, file)}).json()
                data = [{"path": kept, "meta": {"_type": "gradio.FileData"}}, "svit_nano"]
                event = http.post("gradio_api/call/look", json={"data": data}).json()["event_id"]
                with http.stream("GET", f"gradio_api/call/look/{event}"):
                    pass

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        list(pool.map(ask, range(CLIENTS)))  # warm
        warm, begun = megabytes(pid), time.perf_counter()
        rude = pool.submit(leave, told["url"])
        answers = list(pool.map(ask, range(REQUESTS)))
        rude.result()
    took, grown = time.perf_counter() - begun, megabytes(pid) - warm
    print(
        f"\n{REQUESTS} requests from {CLIENTS} clients in {took:.1f} s; memory {warm:.0f} MB, grown by {grown:.0f} MB"
    )
    assert len(answers) == REQUESTS
    for which, answer in answers:
        assert answer["picture"] == paths[which].name
        for one, other in zip(answer["answers"], expected[which]["answers"], strict=True):
            assert one["class"] == other["class"]
            assert one["probability"] == pytest.approx(other["probability"], rel=1e-3)
        assert answer["stages"][0]["title"] == expected[which]["stages"][0]["title"]
    assert grown < GROWTH
