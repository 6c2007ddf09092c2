"""The Markdown pages, what their code blocks need, and how shell blocks run without the network."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

import saccade
from saccade.cli import main
from saccade.data.synthetic.photos import photo_paths

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")
] + sorted(path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "examples"} & set(path.parts))  # fmt: skip
NUCLEI = ROOT / "tests/data/nuclei-mini"
LANGUAGES = {"python", "bash", "bibtex", "text", "yaml", "json", "{toctree}"}

# Shell commands that do not run here: how they begin, or a word of them -> why.
NOT_RUN = {
    "make ": "the Makefile is what runs this suite",
    "pip install": "needs the network",
    "srun": "needs a SLURM cluster",
    "torchrun": "needs several GPUs",
    "trtexec": "needs TensorRT",
    "ovc ": "needs OpenVINO",
    "benchmark_app": "needs OpenVINO",
    "examples/camvid.sh": "starts five trainings for a GPU; their recipes run in tests/engine",
    "python tools/embed_weights.py": "writes into the package; tests/weights runs it",
    "python benchmarks/": "measures; not a test",
    "python -m benchmarks": "measures; not a test",
    "python -m tests.": "runs for hours; the suite runs the same code for seconds",
}
# saccade commands whose arguments are only parsed -> why.
NOT_EXECUTED = {
    "saccade serve": "does not return; tests/web runs the server",
    "saccade demo": "minutes; tests/walk/test_demo.py runs it",
    "saccade reproduce": "minutes to hours; has tests of its own",
    "RECIPE": "a placeholder",
    "--push": "uploads to the Hub; tests/weights/test_hub.py runs it against a fake one",
    "saccade pull sparseformer_tiny": "downloads",
    "--run eager compiled": "compiles for minutes on a CPU",
    "hf-hub:": "downloads",
    "+mask_rcnn.coco": "downloads",
    "detector.onnx": "the export of a released detector, which is not downloaded",
    "s3://": "downloads",
}
# What makes a documented command short enough for a test. A flag that the page gives itself is not added.
SHORT = {
    "train": {"--limit": "4", "--epochs": "1", "--batch": "2", "--device": "cpu"},
    "eval": {"--limit": "4", "--device": "cpu", "--workers": "0"},
    "explain": {"--device": "cpu", "--importance": "gradient"},
    "bench": {"--rounds": "1", "--seconds": "0.01", "--batch": "1", "--sizes": "224", "--device": "cpu"},
}


def parse_page(page: Path, old: str = "", new: str = "") -> Document:
    """Sybil's document of a page, with one region per Python or shell block; `old` in its text is replaced by `new`."""
    text = page.read_text()
    document = Document(text.replace(old, new) if old else text, str(page))
    for parser in (PythonCodeBlockParser(), CodeBlockParser("bash", evaluate_shell)):
        for region in parser(document):
            document.add(region)
    return document


def evaluate_shell(example: Example) -> None:
    """Run the `saccade` commands of a block in this process and `curl` in a shell; others must be listed in NOT_RUN."""
    finished: list[list[str]] = example.namespace.setdefault("finished_commands", [])
    for command in commands(str(example.parsed)):
        words = shlex.split(command, comments=True)
        if words in finished:  # a page may repeat a command in another section
            continue
        finished.append(words)
        if words[0] == "saccade":
            arguments = with_limits(words[1:])
            if not is_listed(command, NOT_EXECUTED):
                code = main(arguments)
                assert code == 0, f"{command}: exit code {code}"
        elif words[0] == "curl" and shutil.which("curl"):
            subprocess.run(words, check=True, timeout=120, stdout=subprocess.DEVNULL)
        elif words[:2] == ["python", "-c"] or (words[0] == "python" and words[1].startswith("examples/")):
            arguments = [str(ROOT / words[1]), *words[2:]] if words[1] != "-c" else words[1:]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, *arguments], check=True, timeout=600, env=environment)
        else:
            assert is_listed(command, NOT_RUN), f"not run, and not in NOT_RUN: {command}"


def commands(block: str) -> list[str]:
    """The commands of a shell block: continued lines and quoted lists are joined."""
    joined: list[str] = []
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        if joined and joined[-1].count('"') % 2:
            joined[-1] += " " + line.strip()
        elif line.strip() and not line.startswith("#"):
            joined.append(line.strip())
    return joined


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of every fenced block of a page."""
    fences = re.finditer(r"^```(\S*)[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(fence[1], fence[2]) for fence in fences]


def is_listed(command: str, reasons: dict[str, str]) -> bool:
    return any(key in command for key in reasons)


def with_limits(arguments: list[str]) -> list[str]:
    """The arguments with the flags of SHORT that they do not give themselves."""
    limits = {} if "--resume" in arguments else SHORT.get(arguments[0], {})
    if "--scaling" in arguments:
        limits = limits | {"--sizes": "96"}
    if "--score" in arguments:  # the other flags are for images
        limits = {"--device": "cpu"}
    extra = [word for flag, value in limits.items() if flag not in arguments for word in (flag, value)]
    if arguments[0] == "train" and limits:
        extra += ["--set", "trainer.compile=false", "--set", "trainer.max_minutes=0.05"]
    return [*arguments, *extra]


def write_material(folder: Path) -> Path:
    """The files that the pages name, from bundled photographs, rendered scenes and the parity kits."""
    from saccade.data.decode.video import write_video
    from saccade.data.synthetic.motions import MotionSet

    shutil.copy(photo_paths()["cat"], folder / "photo.jpg")
    shutil.copy(photo_paths()["rocket"], folder / "street.jpg")
    (folder / "folder").mkdir()
    shutil.copy(photo_paths()["coffee"], folder / "folder")
    for name, classes in (("photos", ("cat", "cup")), ("cifar10", tuple("abcdefghij")), ("tiny-imagenet", ("a", "b"))):
        write_classes(folder / name, classes)
    write_masks(folder / "my_images")
    write_mask_tables(folder / "my_images", folder / "camvid")
    for name in ("nuclei", "coco"):
        shutil.copytree(NUCLEI, folder / name)
    write_video(folder / "clip.mp4", MotionSet(1, 64, 16, "val", 0).read(0).pixels)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


def write_classes(folder: Path, classes: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / name / f"{i}.png")


def write_masks(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        for i in range(4):
            mask = rng.integers(0, 11, (6, 8), np.uint8).repeat(8, 0).repeat(8, 1)
            Image.fromarray(np.stack([mask * 20] * 3, -1)).save(folder / split / "images" / f"{i}.png")
            Image.fromarray(mask).save(folder / split / "masks" / f"{i}.png")


def write_mask_tables(folder: Path, out: Path) -> None:
    """One Parquet file per split of a folder with masks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(files: Path) -> list[dict[str, Any]]:
        return [{"bytes": file.read_bytes(), "path": None} for file in sorted(files.iterdir())]

    out.mkdir()
    for split in ("train", "val", "test"):
        table = {"image": column(folder / split / "images"), "annotation": column(folder / split / "masks")}
        pq.write_table(pa.table(table), out / f"{split}.parquet")


KITS = {  # the authors' files with a parity kit
    "stvit-small.pth": "stvit_small",
    "svit-s.pth": "stvit_small",
    "sparseformer_tiny.pth": "sparseformer_v1_tiny",
    "sparseformer_btsp_augreg_base_converted.pth": "sparseformer_btsp_augreg_base",
}
OWN = {  # the others have our names and initial weights
    "pacavit_small.pth": "paca_small",
    "sparseformer_base.pth": "sparseformer_base",
    "svit_base.pth": "svit_base",
}


def write_checkpoints(page: Path, folder: Path) -> None:
    """The authors' files that a page names."""
    from tests.parity import kit

    text = page.read_text()
    for name, variant in KITS.items():
        if name in text:
            torch.save({"model": kit.weights(variant)}, folder / name)
    for name, model in OWN.items():
        if name in text:
            torch.save(saccade.create_model(model).state_dict(), folder / name)


def namespace_of(page: Path) -> dict[str, Any]:
    """What the code of a page takes for granted."""
    torch.manual_seed(0)
    images = torch.randn(1, 3, 224, 224)
    common: dict[str, Any] = {"torch": torch, "saccade": saccade, "images": images, "image": images}
    if page.name == "segmentation.md":
        common |= {"images": torch.randn(2, 3, 64, 64), "masks": torch.randint(0, 150, (2, 64, 64))}
    if page.name == "detection.md":
        target = {"boxes": torch.tensor([[8.0, 8.0, 50.0, 60.0]]), "labels": torch.tensor([1])}
        target["masks"] = torch.ones(1, 96, 96, dtype=torch.uint8)
        common |= {"images": [torch.rand(3, 96, 96)], "targets": [target]}
    if page.name == "video.md":
        common |= {"clips": torch.randn(1, 3, 8, 64, 64)}
    if page.name == "sparseformer.md":
        common |= {"scaler": torch.amp.GradScaler("cpu")}
    if page.name in ("explain.md", "deploy.md", "speed.md"):
        model = saccade.load("svit_nano")
        common |= {"model": model, "card": model.card}
    return common


@contextmanager
def no_downloads() -> Iterator[None]:
    """timm's `pretrained=True` keeps the initial weights where it would download; embedded weights are loaded."""
    from timm.models import _builder

    original = _builder.load_pretrained

    def load(model: torch.nn.Module, pretrained_cfg: Any = None, **options: Any) -> None:
        config = pretrained_cfg or model.pretrained_cfg
        get = config.get if isinstance(config, dict) else lambda key: getattr(config, key, None)
        if get("file"):
            original(model, pretrained_cfg=pretrained_cfg, **options)

    with patch.object(_builder, "load_pretrained", load), patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        yield
