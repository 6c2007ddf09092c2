"""`saccade train`: train a recipe, or a model by name, on a data set."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.engine.recipe import Recipe

HELP = "train a model from a recipe or by name; resumable, with an HTML report"
EXAMPLE = """saccade train --model svit_nano --data scenes --out runs/first
         saccade train recipes/small/svit_nano_cifar10.yaml --data cifar10/ --out runs/cifar --set optimizer.lr=5e-4
         saccade train --resume --out runs/cifar
         saccade train --model paca_nano --head paca --data scenes --out runs/masks"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a YAML file, or the name of one under recipes/")
    parser.add_argument("--model", metavar="NAME", help="a saccade or timm model; replaces the recipe's")
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="head for --model. Segmentation: vt_fpn, fpn, paca, upernet, sparse; detection: mask_rcnn, "
        "cascade_mask_rcnn",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="folders of images or videos by class, Parquet, COCO JSON, tar shards, a Hugging Face data set, a CSV "
        "list, or the embedded sets scenes and motions",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or start it if there is none")
    parser.add_argument("--seed", type=int, help="random seed (default: the recipe's, 0)")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")


def run(args: argparse.Namespace) -> int:
    from saccade._extras import require

    require("lightning.pytorch", "train")
    from saccade.cli import pick_device, print_json
    from saccade.engine.train import train

    recipe = resolve_recipe(args)
    name = "+".join(filter(None, (recipe.model.name, recipe.model.head)))
    out = Path(args.out or f"runs/{name}_{Path(recipe.data.path).name}")
    device = None if args.device == "auto" else pick_device(args.device)
    command = shlex.join(["saccade", *sys.argv[1:]])
    finished = train(recipe, out, args.resume, device, command, progress=not (args.json or args.quiet))
    if finished.stopped:
        hint = f"the checkpoint is saved. Continue with: saccade train --resume --out {out}"
        print(f"stopped by {finished.stopped}; {hint}", file=sys.stderr)
        return 1
    if not finished.result:  # process 0 of a distributed run prints the result
        return 0
    if args.json:
        print_json(finished.result | {"out": str(out)})
    else:
        print_result(finished.result, out)
    return 0


def resolve_recipe(args: argparse.Namespace) -> "Recipe":
    """Return the recipe file with --model and --data, then --set applied; --resume alone uses the run's own recipe."""
    from saccade.engine.recipe import RecipeError, load_recipe

    changes = list(args.set)
    source = find_recipe(args.recipe) if args.recipe else None
    if source is None and args.resume and args.out and (Path(args.out) / "recipe.yaml").is_file():
        source = Path(args.out) / "recipe.yaml"
    if source is None and not args.model:
        raise RecipeError("nothing to train: give a recipe (recipes/*/*.yaml) or --model NAME.")
    if args.model and source is None and is_video_model(args.model):
        changes = ["task=video", *changes]
    if args.model:  # replaces the group: keyword arguments of the recipe's own model would not apply
        changes = [f"model={{name: {args.model}}}", *changes]
    if args.head:
        changes = [*task_of_head(args.head), *changes, f"model.head={args.head}"]
    if args.data:
        changes = [f"data.path={args.data!r}", *changes]
    if args.seed is not None:
        changes = [f"seed={args.seed}", *changes]
    return load_recipe(source, changes)


def task_of_head(head: str) -> list[str]:
    """Return the recipe changes for the task of a head; "sparse" means segmentation unless --set task=detection."""
    from saccade.tasks.detection import REGION_HEADS

    return ["task=detection", "augment.crop=none"] if head in REGION_HEADS else ["task=segmentation"]


def is_video_model(name: str) -> bool:
    """Return whether a model is a video model."""
    import timm

    import saccade  # noqa: F401  (registers the models)

    config = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    return config is not None and len(config.input_size) == 4


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
    recipe_file = recipes.get(path.stem)
    if recipe_file is not None:
        folders_of_file = recipe_file.parent.parts
        if path.parent.parts in ((), ("recipes",), folders_of_file[-1:], folders_of_file[-2:]):
            return recipe_file
    close = get_close_matches(path.stem, recipes, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Known recipes: {', '.join(sorted(recipes))}."
    raise RecipeError(f"no recipe {name}. {hint}")


def print_result(result: dict[str, Any], out: Path) -> None:
    from saccade.engine.results import METRIC_NAMES

    final, best, score = result["final"], result["best"], result["score"]
    metrics = [f"{METRIC_NAMES[key]} {final[key]:.2f} %" for key in final if key in METRIC_NAMES and key != "loss"]
    print(f"{result['model']} on {result['data']}: {', '.join(metrics)} on {final['count']} images")
    speed = result["train_images_per_s"]
    throughput = f", {speed:,.0f} images/s" if speed else ""
    length = f"{result['epochs']:g} epochs in {result['minutes']:.1f} min{throughput}"
    print(f"best {METRIC_NAMES[score]} {best[score]:.2f} % · {length} · {result['unreadable']} unreadable images")
    for name in ("report.html", "best.safetensors", "last.safetensors", "metrics.csv", "result.json", "recipe.yaml"):
        print(f"wrote {out / name}")
