"""`saccade convert IN OUT`: convert an authors' checkpoint."""

import argparse
from typing import Any

from saccade._errors import UsageError

HELP = "convert an authors' checkpoint to saccade's safetensors; nothing in the file is executed"
NOTES = ("saccade.source", "saccade.sha256", "saccade.licence", "saccade.accuracy", "saccade.note")
EXAMPLE = "saccade convert stvit-small.pth svit_small.safetensors"
FLAGS = ("set",)  # of the shared ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="the authors' .pth file, or a saccade file")
    parser.add_argument("target", metavar="OUT", help="the .safetensors file to write")
    parser.add_argument("--model", help="model name (default: identified from the tensors)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload OUT to this Hugging Face Hub repository")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from saccade.cli import check_model, print_json, settings
    from saccade.models.card import save_model

    if Path(args.target).suffix != ".safetensors":
        raise UsageError(f"expected OUT to end in .safetensors, got {args.target}.")
    if args.model:
        check_model(args.model, settings(args.set))
    model, card, notes, report = read(args)
    save_model(model, args.target, card, **notes)
    address = None
    if args.push:
        from saccade.weights.hub import push

        address = push(Path(args.target), args.push)
    name = f"{card.name}+{card.head}" if card.head else card.name
    row = {"model": name, "num_classes": card.num_classes, "tensors": len(model.state_dict()), "out": args.target}
    if args.json:
        print_json(row | ({"pushed": address} if address else {}))
    else:
        print(f"{name}, {card.num_classes} classes: {report}\nwrote {args.target}")
        if address:
            print(f"pushed to {address}")
    return 0


def read(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any], str]:
    """Model, card, notes for the metadata, and a report: of a saccade file, or of an authors' file."""

    from saccade import load, load_checkpoint
    from saccade.models.official import heads
    from saccade.tasks.load import check_format
    from saccade.weights.read import read_metadata, read_state_dict, weights_file

    source = weights_file(args.source)
    check_format(source)
    metadata = read_metadata(source) if source.suffix == ".safetensors" else {}
    notes: dict[str, Any] = {k.removeprefix("saccade."): v for k, v in metadata.items() if k in NOTES}
    notes["converted_from"] = source.name
    if "saccade.model" in metadata and not args.model and not args.set:
        model: Any = load(source)
        return model, model.card, notes, f"{len(model.state_dict())} tensors of a saccade file"
    state_dict = read_state_dict(source)
    model, card = (segmenter if heads.matches(state_dict) else classifier)(args, state_dict)
    return model, card, notes, str(load_checkpoint(model, state_dict))


def classifier(args: argparse.Namespace, state_dict: dict[str, Any]) -> tuple[Any, Any]:
    """The model of a classifier, and its card."""
    from saccade import Card, create_model
    from saccade.cli import check_model, settings
    from saccade.models.card import preprocess_of
    from saccade.models.checkpoint import identify

    options: dict[str, Any] = settings(args.set)
    name, classes = (args.model, None) if args.model else identify(state_dict)
    if classes is not None:
        options.setdefault("num_classes", classes)
    check_model(name, options)
    model: Any = create_model(name, pretrained=False, **options)
    options.pop("num_classes", None)
    return model, Card(name, model.num_classes, options, [], preprocess_of(model))


def segmenter(args: argparse.Namespace, state_dict: dict[str, Any]) -> tuple[Any, Any]:
    """The model of a backbone with its head, as mmsegmentation saves them, and its card."""
    from saccade import create_segmenter
    from saccade.models.card import preprocess_of
    from saccade.tasks.load import identify_segmenter

    if args.set:
        raise ValueError("--set is for classifiers, got the file of a segmenter. Remove it.")
    card = identify_segmenter(state_dict)
    if args.model and args.model != card.name:
        raise ValueError(f"expected --model {card.name} for this file (head {card.head}), got {args.model}.")
    model = create_segmenter(card.name, card.head, card.num_classes, backbone_kwargs=card.kwargs)
    return model, card._replace(preprocess=preprocess_of(model.backbone_model))
