"""Replace the folder of embedded weights and fill it with `tools/embed_weights.py`."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import patch

import torch
from timm.models import _registry

import saccade
from saccade import weights
from saccade.models.card import Card, Preprocess, save_model
from saccade.weights.tags import register_embedded

SHIPPED = Path(weights.__file__).parent
TOOL = Path(__file__).parents[2] / "tools/embed_weights.py"
WORDNET = ["n02123045 tabby", "n07920052 espresso", "n01443537 goldfish", "crane"]


def load_tool():
    spec = spec_from_file_location("embed_weights", TOOL)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def weights_in(folder: Path) -> Iterator[None]:
    """Use `folder` instead of the one in the package, and restore timm's registry afterwards."""
    registers = ("_model_pretrained_cfgs", "_model_has_pretrained", "_model_with_tags", "_model_default_cfgs")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(patch.object(weights, "FOLDER", folder))
        for name in registers:
            stack.enter_context(patch.object(_registry, name, copy(getattr(_registry, name))))
        for name, tags in list(_registry._model_with_tags.items()):  # remove the tags of the package's weights
            if name in saccade.list_models():
                default = _registry._model_default_cfgs[name]
                remaining = [tag for tag in default.tags if not default.cfgs[tag].file]
                entry = type(default)(
                    tags=type(default.tags)(remaining), cfgs={tag: default.cfgs[tag] for tag in remaining}
                )
                _registry._model_default_cfgs[name] = entry
                _registry._model_with_tags[name] = [full for full in tags if full.partition(".")[2] in remaining]
                _registry._model_has_pretrained.discard(name)
        register_embedded()
        yield


def make_run(out: Path, name: str = "svit_nano", classes: list[str] | None = None, seed: int = 0, **card) -> Path:
    """Write the files of a training run with randomly initialised weights."""
    classes = classes or WORDNET
    torch.manual_seed(seed)
    task, kwargs = card.get("task", "classification"), card.pop("kwargs", {})
    if task == "segmentation":
        model = saccade.create_segmenter(name, card["head"], len(classes), head_kwargs=card.get("head_kwargs"))
    else:
        model = saccade.create_model(name, num_classes=len(classes), **kwargs)
    card_of_run = Card(name, len(classes), kwargs, classes, Preprocess(64, crop_pct=0.9), **card)
    save_model(model, out / "best.safetensors", card_of_run)
    score = {"top1": 41.5, "top5": 66.6} if task == "classification" else {"miou": 55.5, "aacc": 80.0}
    result = {
        "data": "tiny-imagenet", "train_images": 40000, "val_images": 5000, "epochs": 100, "minutes": 8.5,
        "parameters": 2_489_274, "final": score, "best": score | {"step": 9}, "machine": {"device": "a card"},
        "command": f"saccade train /home/me/recipes/small/{name}_tiny_imagenet.yaml --data /home/me/tiny-imagenet/",
        "recipe": {
            "batch_size": 512, "optimizer": {"name": "adamw", "lr": 1e-3},
            "model": {"checkpoint": None}, "distill": {"teacher": "/home/me/runs/teacher.safetensors"},
        },
    }  # fmt: skip
    (out / "result.json").write_text(json.dumps(result))
    return out
