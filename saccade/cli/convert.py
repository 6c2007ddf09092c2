"""`saccade convert IN OUT`: convert an authors' checkpoint."""

import argparse
from typing import Any

HELP = "convert an authors' checkpoint to saccade's safetensors; nothing in the file is executed"
EXAMPLE = "saccade convert stvit-small.pth svit_small.safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="the authors' .pth file, or a saccade file")
    parser.add_argument("target", metavar="OUT", help="the .safetensors file to write")
    parser.add_argument("--model", help="model name (default: identified from the tensors)")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from saccade import create_model, load_checkpoint, save_checkpoint
    from saccade.cli import print_json, settings
    from saccade.models.checkpoint import identify, read_state_dict
    from saccade.models.official import heads

    if Path(args.target).suffix != ".safetensors":
        raise ValueError(f"expected OUT to end in .safetensors, got {args.target}.")
    state_dict = read_state_dict(args.source)
    if heads.matches(state_dict):
        return convert_segmenter(args, state_dict)
    options: dict[str, Any] = settings(args.set)
    name, classes = (args.model, None) if args.model else identify(state_dict)
    if classes is not None:
        options.setdefault("num_classes", classes)
    model = create_model(name, pretrained=False, **options)
    report = load_checkpoint(model, state_dict)
    save_checkpoint(model, args.target, {"saccade.converted_from": Path(args.source).name})
    if args.json:
        print_json({"model": name, "num_classes": model.num_classes, "tensors": report.loaded, "out": args.target})
    else:
        print(f"{name}, {model.num_classes} classes: {report}\nwrote {args.target}")
    return 0


def convert_segmenter(args: argparse.Namespace, state_dict: dict[str, Any]) -> int:
    """Convert a backbone with its head, as mmsegmentation saves them."""
    from pathlib import Path

    from saccade import create_segmenter, load_checkpoint
    from saccade.cli import print_json
    from saccade.models.card import preprocess_of, save_model
    from saccade.tasks.open import identify_segmenter

    card = identify_segmenter(state_dict)
    if args.model and args.model != card.name:
        raise ValueError(f"expected --model {card.name} for this file (head {card.head}), got {args.model}.")
    model = create_segmenter(card.name, card.head, card.num_classes, backbone_kwargs=card.kwargs)
    report = load_checkpoint(model, state_dict)
    card = card._replace(preprocess=preprocess_of(model.backbone_model))
    save_model(model, args.target, card, converted_from=Path(args.source).name)
    name = f"{card.name}+{card.head}"
    if args.json:
        print_json({"model": name, "num_classes": card.num_classes, "tensors": report.loaded, "out": args.target})
    else:
        print(f"{name}, {card.num_classes} classes: {report}\nwrote {args.target}")
    return 0
