"""Send hostile and valid uploads, mixed, to a server: `python -m tests.web.hostile_uploads --uploads 10000`.

Valid images must return their own result, hostile ones a 4xx status. The server's memory after every tenth of the run
is compared with that after the first, and the files it leaves are listed. Prints one line of JSON; exit code 1 if
memory grew by more than 2 %, a file remained outside the cache folder, or a result was wrong.
"""

import argparse
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import image_seeds

NAMES = ["../../escape.png", "/etc/passwd", "a\x00.png", "..", "c:\\x.png", "x" * 300, "%2e%2e%2fescape.png"]
VALID = 40  # different images, more than the server caches
CLIENTS = 4
MAX_GROWTH = 0.02
ALLOWED = {200, 400, 404, 413, 422, 503}


def valid_image(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (48, 48, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def start_server(folder: Path, options: list[str]) -> tuple[subprocess.Popen, str]:
    """`saccade serve` with its temporary files and home in `folder`."""
    environment = os.environ | {"TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home")}
    for name in ("tmp", "home", "work"):
        (folder / name).mkdir()
    command = [sys.executable, "-m", "saccade.cli", "serve", "--model", "svit_nano", "--json", "--device", "cpu"]
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        cwd=folder / "work",
    )  # fmt: skip
    lines = ""
    assert process.stdout is not None
    while not lines.rstrip().endswith("\n}"):
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the server exited before it was ready")
        lines += line
    return process, json.loads(lines)["url"]


def megabytes(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1000


def run(uploads: int, seed: int, folder: Path) -> dict:
    """Counts, memory after every tenth, and files that remain outside the service's own folder."""
    process, url = start_server(folder, [])
    try:
        rng = random.Random(seed)
        seeds, images = image_seeds(), [valid_image(number) for number in range(VALID)]
        with httpx.Client(base_url=url, timeout=300) as http:

            def post(content: bytes, name: str = "upload") -> httpx.Response:
                return http.post("api/predict", params={"model": "svit_nano", "name": name}, content=content)

            expected = [post(image).json()["classes"] for image in images]
            unexpected: list[str] = []
            counts = {"valid": 0, "hostile": 0, "rejected": 0, "reset": 0, "mixed_up": 0, "unexpected_status": 0}

            def send(job: tuple[int, bytes, str]) -> None:
                index, content, name = job
                try:
                    response = post(content, name)
                except httpx.TransportError:  # rejected by its name before the body was read: the connection is reset
                    counts["mixed_up" if index >= 0 or process.poll() is not None else "reset"] += 1
                    return
                if response.status_code not in ALLOWED:
                    counts["unexpected_status"] += 1
                    unexpected.append(f"{response.status_code} {name!r} {content[:2000].hex()}")
                if index >= 0:
                    counts["valid"] += 1
                    if response.status_code != 200 or response.json()["classes"] != expected[index]:
                        counts["mixed_up"] += 1
                else:
                    counts["hostile"] += 1
                    counts["rejected"] += response.status_code >= 400

            def jobs(count: int) -> list[tuple[int, bytes, str]]:
                result = []
                for _ in range(count):
                    kind = rng.random()
                    if kind < 0.3:
                        index = rng.randrange(VALID)
                        result.append((index, images[index], f"{index}.png"))
                    elif kind < 0.4:
                        result.append((-1, images[0], rng.choice(NAMES)))
                    elif kind < 0.45:
                        result.append((-1, rng.randbytes(rng.randrange(2000)), "noise.jpg"))
                    else:
                        result.append((-1, mutate(rng.choice(seeds), rng, seeds), "hostile.png"))
                return result

            with ThreadPoolExecutor(CLIENTS) as pool:
                memory = []
                for _ in range(10):
                    list(pool.map(send, jobs(uploads // 10)))
                    memory.append(round(megabytes(process.pid)))
        warm, largest = memory[0], max(memory)
        service = re.compile(r"tmp/(saccade-[^/]+|gradio)(/|$)")
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        outside = [name for name in files if not service.match(name) and not name.startswith("home/.cache")]
        left = [name for name in files if service.match(name) and "/photos/" not in name]
        return {
            "uploads": uploads, **counts, "megabytes": memory, "unexpected": unexpected[:3],
            "growth": round(largest / warm - 1, 4), "outside": outside, "left_in_cache": len(left),
        }  # fmt: skip
    finally:
        process.terminate()
        process.wait(120)


def is_good(result: dict) -> bool:
    wrong = result["mixed_up"] or result["unexpected_status"] or result["outside"]
    return not wrong and result["growth"] <= MAX_GROWTH


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.web.hostile_uploads")
    parser.add_argument("--uploads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(options.uploads, options.seed, Path(folder))
    print(json.dumps(result))
    return 0 if is_good(result) else 1


if __name__ == "__main__":
    sys.exit(main())
