"""Put a training run's weights into the package: half precision, with a card.

    python tools/embed_weights.py runs/svit_nano_tiny_imagenet --tag tiny_imagenet --data tiny-imagenet/

writes saccade/weights/svit_nano.tiny_imagenet.safetensors and .md. The tag is found by itself from then on. With
--data the file is evaluated as it will be shipped, and the card gets that figure; without it, the run's own.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # this tree's package gets the weights, not an installed one

import torch
from torch import Tensor

from saccade import weights
from saccade.explain.drawing.figure import write_atomic
from saccade.models.card import Card, save_model, weights_file
from saccade.tasks.open import open_task_model

TERMS = {  # by the name of the data's folder
    "tiny-imagenet": (
        "Tiny-ImageNet-200 (Stanford CS231n), a 64 px subset of ImageNet, in a re-encoded copy",
        "ImageNet's: non-commercial research and education only. The weights are given for the same purposes.",
    ),
    "camvid": (
        "CamVid (Brostow, Shotton, Fauqueur, Cipolla, ECCV 2008), 11 classes, the split of the SegNet tutorial",
        "non-commercial research; the SegNet tutorial's release is CC BY-NC 4.0. The weights are given for the same.",
    ),
    "cifar10": (
        "CIFAR-10 (Krizhevsky, 2009), in a copy saved as JPEG",
        "the authors state none but the citation; taken as research use.",
    ),
    "scenes": ("saccade's own rendered scenes of ten shapes", "none: they are drawn by a program of this package."),
}
LIMITS = {
    "classification": (
        "Small pictures, few of them: it knows {classes} classes and nothing else, and names one of them for any "
        "picture. It looks at {size} px; details finer than that are lost. A demonstration of how the tokens group "
        "a picture, not a product: do not decide about people, money or safety with it."
    ),
    "segmentation": (
        "One data set of {pictures} pictures taken in one place: expect it to fail in other cities, weather, cameras "
        "and viewpoints. It gives one of {classes} classes to every pixel of any picture. A demonstration, not a "
        "product: do not drive with it."
    ),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a training run's folder, with result.json")
    parser.add_argument("--tag", required=True, help="what it learned from, as in tiny_imagenet")
    parser.add_argument("--weights", choices=("best", "last"), default="best", help="which of the run's weights")
    parser.add_argument("--data", metavar="PATH", help="evaluate what is shipped on this data")
    parser.add_argument("--device", default="cpu", help="to evaluate on")
    parser.add_argument("--about-data", nargs=2, metavar=("DATA", "TERMS"), help="of data this tool does not know")
    parser.add_argument("--note", default="", help="a sentence for the card: what was tried, what it sees")
    args = parser.parse_args(argv)
    try:
        path = embed(Path(args.run), args.tag, args.weights, args.data, args.device, args.about_data, args.note)
    except (ValueError, OSError) as error:
        print(f"embed_weights: {error}", file=sys.stderr)
        return 1
    print(f"wrote {path} ({path.stat().st_size / 1e6:.2f} MB) and {path.with_suffix('.md').name}")
    return 0


def embed(
    run: Path,
    tag: str,
    which: str = "best",
    data: str | None = None,
    device: str = "cpu",
    about_data: list[str] | tuple[str, str] | None = None,
    note: str = "",
) -> Path:
    """A run's weights and card into `weights.FOLDER`; whole or not at all."""
    if not tag.replace("_", "").isalnum():
        raise ValueError(f"a tag has letters, digits and _, as in tiny_imagenet; got {tag!r}.")
    result = read_result(run)
    model, card = open_task_model(weights_file(run / f"{which}.safetensors"))
    if card.task not in LIMITS or card.preprocess.frames:
        raise ValueError(f"the run is of {card.task}: only classifiers and segmenters of pictures are embedded.")
    if card.task == "classification" and card.kwargs:
        raise ValueError(
            f"the run changed the model ({card.kwargs}): create_model(…, pretrained=True) builds the plain {card.name}."
        )
    source, terms = about_data or TERMS.get(result["data"]) or (None, None)
    if not source or not terms:
        raise ValueError(f"the terms of {result['data']!r} are not known here: give --about-data DATA TERMS.")
    name = f"{card.name}+{card.head}" if card.head else card.name
    target = weights.FOLDER / f"{name}.{tag}.safetensors"
    state_dict = {key: halved(value) for key, value in model.state_dict().items()}
    check_size(target, state_dict)
    about: dict[str, Any] = {
        "data": source,
        "terms": terms,
        "accuracy": accuracy_of(result, card, which),
        "measured_by": without_places(result["command"]),
        "command": without_places(result["command"]),
        "limits": LIMITS[card.task].format(
            classes=card.num_classes, size=card.preprocess.size, pictures=result["train_images"]
        ),
        "note": note,
    }
    staged = target.with_name(f".{target.name}.staged.safetensors")  # a hidden name: no tag, until it is measured
    try:
        save_model(model, staged, card, state_dict, about=json.dumps(about))
        if data:
            about["accuracy"] = evaluate(staged, card.task, data, device)
            about["measured_by"] = f"saccade eval {name}.{tag} --data {Path(data).name}"
        save_model(model, staged, card, state_dict, about=json.dumps(about))
        write_atomic(target.with_suffix(".md"), write_card(f"{name}.{tag}", card, about, result, staged.stat().st_size))
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
    return target


def without_places(command: str) -> str:
    """A command without the folders of the machine it ran on; recipes keep theirs, which every checkout has."""

    def short(word: str) -> str:
        key, sign, path = word.rpartition("=")
        folder = "recipes/" if "/recipes/" in f"/{path}" else ""
        return key + sign + folder + Path(path).name

    return " ".join(short(word) for word in command.split())


def read_result(run: Path) -> dict[str, Any]:
    path = run / "result.json"
    if not path.is_file():
        raise ValueError(f"{run} has no result.json: the run is not finished (saccade train --resume --out {run}).")
    return json.loads(path.read_text())


def halved(tensor: Tensor) -> Tensor:
    """In half precision; a tensor with values beyond its range stays as it is."""
    half = tensor.half() if tensor.is_floating_point() else tensor
    return half if bool(torch.isfinite(half).all()) else tensor


def check_size(target: Path, state_dict: dict[str, Tensor]) -> None:
    """Against the limits, before anything is written."""
    size = sum(value.numel() * value.element_size() for value in state_dict.values())
    others = sum(path.stat().st_size for path in weights.embedded().values() if path != target)
    if size > weights.LARGEST:
        raise ValueError(f"{target.name} would be {size / 1e6:.1f} MB; at most {weights.LARGEST / 1e6:g} MB a file.")
    if size + others > weights.ALTOGETHER:
        raise ValueError(
            f"with {target.name} all embedded weights would be {(size + others) / 1e6:.1f} MB; "
            f"at most {weights.ALTOGETHER / 1e6:g} MB."
        )


def accuracy_of(result: dict[str, Any], card: Card, which: str) -> dict[str, float]:
    """What the run says of these weights, in percent."""
    found = result["best"] if which == "best" and result["best"] else result["final"]
    wanted = ("top1", "top5", "calibration") if card.task == "classification" else ("miou", "macc", "aacc")
    return {key: round(found[key], 2) for key in wanted if key in found}


def evaluate(path: Path, task: str, data: str, device: str) -> dict[str, float]:
    """The same for the file as it is shipped."""
    from saccade.engine.evaluate import evaluate_checkpoint
    from saccade.engine.evaluate_masks import evaluate_segmenter_checkpoint

    if task == "classification":
        found = evaluate_checkpoint(path, data, device=device)[0].summary()
        return {key: round(found[key], 2) for key in ("top1", "top5", "calibration")}
    found = evaluate_segmenter_checkpoint(path, data, device=device)[0].summary()
    return {key: round(found[key], 2) for key in ("miou", "macc", "aacc")}


def plan_of(recipe: dict[str, Any]) -> str:
    """The few lines of a recipe that a reader looks for; a resumed run's command does not show them."""
    said = []
    if optimizer := recipe.get("optimizer"):
        said.append(f"{optimizer['name']}, rate {optimizer['lr']:g}, batch {recipe['batch_size']}")
    if teacher := recipe.get("distill", {}).get("teacher"):
        said.append(f"taught by {Path(teacher).name}")
    if start := recipe.get("model", {}).get("checkpoint"):
        said.append(f"from the weights of an earlier run ({Path(start).name})")
    return "".join(f"{part}, " for part in said)


def write_card(name: str, card: Card, about: dict[str, Any], result: dict[str, Any], size: int) -> str:
    """The card for people."""
    use = (
        f'saccade.create_model("{name}", pretrained=True)'
        if card.task == "classification"
        else f'saccade.create_segmenter("{card.name}", "{card.head}", pretrained="{name.rpartition(".")[2]}")'
    )
    figures = ", ".join(f"{key} {value:g} %" for key, value in about["accuracy"].items())
    seen, machine = card.preprocess, result["machine"]
    side = f"shorter side {card.shorter or 'as it is'}" if card.task != "classification" else f"{seen.size} px"
    lines = [
        f"# {name}",
        "",
        f"`{use}`",
        "",
        "| | |",
        "|---|---|",
        f"| model | {card.name}{f' with the {card.head} head' if card.head else ''}, "
        f"{result['parameters'] / 1e6:.2f} M parameters, {size / 1e6:.2f} MB in half precision |",
        f"| data | {about['data']}: {result['train_images']} pictures to learn from, "
        f"{result['val_images']} to measure |",
        f"| terms of the data | {about['terms']} |",
        f"| accuracy | {figures}: `{about['measured_by']}` |",
        f"| recipe | `{about['command']}`: {plan_of(result.get('recipe', {}))}{result['epochs']:g} epochs, "
        f"{result['minutes']:g} minutes on {machine.get('device', 'one machine')}, torch {machine.get('torch', '?')}, "
        f"{machine.get('date', 'undated')} |",
        f"| input | {side}, crop {seen.crop_pct:g}, {seen.interpolation}, "
        f"mean {tuple(seen.mean)}, std {tuple(seen.std)} |",
        f"| limits | {about['limits']} |",
    ]
    if about["note"]:
        lines.append(f"| notes | {about['note']} |")
    lines += ["", f"Classes: {', '.join(card.names)}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
