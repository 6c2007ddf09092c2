"""`saccade convert IN OUT`: an authors' file to ours."""

import argparse

HELP = "convert an authors' checkpoint to saccade's safetensors; nothing in the file is executed"
EXAMPLE = "saccade convert stvit-small.pth svit_small.safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="the authors' .pth file, or a saccade file")
    parser.add_argument("target", metavar="OUT", help="the .safetensors file to write")
    parser.add_argument("--model", help="model name; told from the tensors when left out")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from saccade import create_model, load_checkpoint, save_checkpoint
    from saccade.cli import print_json, settings
    from saccade.models._checkpoint import identify, read_state_dict

    if Path(args.target).suffix != ".safetensors":
        raise ValueError(f"OUT must end in .safetensors, got {args.target}")
    state_dict = read_state_dict(args.source)
    options = settings(args.set)
    name, classes = (args.model, None) if args.model else identify(state_dict)
    if classes is not None:
        options = {"num_classes": classes} | options
    model = create_model(name, **options)
    report = load_checkpoint(model, state_dict)
    save_checkpoint(model, args.target, {"saccade.converted_from": Path(args.source).name})
    if args.json:
        print_json({"model": name, "num_classes": model.num_classes, "tensors": report.loaded, "out": args.target})
    else:
        print(f"{name}, {model.num_classes} classes: {report}\nwrote {args.target}")
    return 0
