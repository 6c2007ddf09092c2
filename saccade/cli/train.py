"""`saccade train`: a recipe or a model's name, and a path to pictures."""

import argparse
import shlex
import sys
from pathlib import Path

HELP = "train a model on your pictures: a recipe, or a model's name; resumable, with one HTML report"
EXAMPLE = """saccade train --model svit_nano --data scenes --out runs/first
         saccade train recipes/small/svit_nano_cifar10.yaml --data cifar10/ --out runs/cifar --set optimizer.lr=5e-4
         saccade train --resume --out runs/cifar
         saccade train --model paca_nano --head paca --data scenes --out runs/masks"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a YAML file, or the name of one under recipes/")
    parser.add_argument("--model", metavar="NAME", help="any of saccade's or timm's models, in place of the recipe's")
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="on --model. Segmentation: vt_fpn, fpn, paca, upernet, sparse; detection: mask_rcnn, cascade_mask_rcnn",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="class folders of pictures or videos, Parquet, COCO JSON, tar shards, Hugging Face set, CSV list, "
        "scenes or motions",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or start it if there is none")
    parser.add_argument("--seed", type=int, help="seed of every random number (default: the recipe's, 0)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    from saccade._extras import require

    require("lightning.pytorch", "train")
    from saccade.cli import pick_device, print_json
    from saccade.engine.train import train

    recipe = resolve(args)
    name = "+".join(filter(None, (recipe.model.name, recipe.model.head)))
    out = Path(args.out or f"runs/{name}_{Path(recipe.data.path).name}")
    device = None if args.device == "auto" else pick_device(args.device)
    command = shlex.join(["saccade", *sys.argv[1:]])
    finished = train(recipe, out, args.resume, device, command, progress=not (args.json or args.quiet))
    if finished.stopped:
        print(f"stopped by {finished.stopped}; the state is saved: saccade train --resume --out {out}", file=sys.stderr)
        return 1
    if not finished.result:  # another process of a distributed run tells the story
        return 0
    if args.json:
        print_json(finished.result | {"out": str(out)})
    else:
        tell(finished.result, out)
    return 0


def resolve(args: argparse.Namespace):
    """Recipe file, then --model and --data, then --set; a resumed run without a recipe takes its own."""
    from saccade.engine.recipe import RecipeError, load_recipe

    changes = list(args.set)
    source = find_recipe(args.recipe) if args.recipe else None
    if source is None and args.resume and args.out and (Path(args.out) / "recipe.yaml").is_file():
        source = Path(args.out) / "recipe.yaml"
    if source is None and not args.model:
        raise RecipeError("nothing to train: give a recipe (recipes/*/*.yaml) or --model NAME.")
    if args.model and source is None and takes_clips(args.model):
        changes = ["task=video", *changes]
    if args.model:  # options of the recipe's own model would not fit
        changes = [f"model={{name: {args.model}}}", *changes]
    if args.head:
        changes = [*task_of(args.head), *changes, f"model.head={args.head}"]
    if args.data:
        changes = [f"data.path={args.data!r}", *changes]
    if args.seed is not None:
        changes = [f"seed={args.seed}", *changes]
    return load_recipe(source, changes)


def task_of(head: str) -> list[str]:
    """What a head is for; of the two that are called "sparse", --set task=detection names the other."""
    from saccade.tasks.detection import REGION_HEADS

    return ["task=detection", "augment.crop=none"] if head in REGION_HEADS else ["task=segmentation"]


def takes_clips(name: str) -> bool:
    """Whether a model is one of video."""
    import timm

    import saccade  # noqa: F401  (registers the models)

    known = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    return known is not None and len(known.input_size) == 4


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given as a path, as "imagenet/svit_small", or by its bare name "svit_small".

    Names are looked up in ./recipes, in this source tree and in the installed data files.
    """
    from difflib import get_close_matches

    from saccade.engine.recipe import RecipeError

    path = Path(name)
    if path.is_file():
        return path
    folders = [Path("recipes"), Path(__file__).parents[2] / "recipes", Path(sys.prefix) / "share/saccade/recipes"]
    recipes = {file.stem: file for folder in reversed(folders) for file in sorted(folder.glob("*/*.yaml"))}
    found = recipes.get(path.stem)
    if found is not None and path.parent.parts in ((), ("recipes",), found.parent.parts[-1:], found.parent.parts[-2:]):
        return found
    close = get_close_matches(path.stem, recipes, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Known recipes: {', '.join(sorted(recipes))}."
    raise RecipeError(f"no recipe {name}. {hint}")


def tell(result: dict, out: Path) -> None:
    from saccade.engine.results import METRIC_NAMES

    final, best, score = result["final"], result["best"], result["score"]
    figures = [f"{METRIC_NAMES[key]} {final[key]:.2f} %" for key in final if key in METRIC_NAMES and key != "loss"]
    print(f"{result['model']} on {result['data']}: {', '.join(figures)} on {final['count']} pictures")
    speed = result["train_images_per_s"]
    pace = f", {speed:,.0f} images/s" if speed else ""
    length = f"{result['epochs']:g} epochs in {result['minutes']:.1f} min{pace}"
    print(f"best {METRIC_NAMES[score]} {best[score]:.2f} % · {length} · {result['unreadable']} unreadable pictures")
    for name in ("report.html", "best.safetensors", "last.safetensors", "metrics.csv", "result.json", "recipe.yaml"):
        print(f"wrote {out / name}")
