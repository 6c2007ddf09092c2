"""Recipes: types, errors, and the papers' values."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import saccade
from saccade.engine.recipe import RANGES, Optimizer, Recipe, RecipeError, load_recipe, to_dict, to_yaml

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(RECIPES.glob("*/*.yaml"))


def test_changes_are_converted_to_type_of_key():
    recipe = load_recipe(None, ["optimizer.lr=5e-4", "augment.scale=[0.2, 1]", "epochs=3", "trainer.compile=true"])
    assert (recipe.optimizer.lr, recipe.augment.scale, recipe.epochs, recipe.trainer.compile) == (
        5e-4,
        (0.2, 1.0),
        3,
        True,
    )
    assert load_recipe(None, ["model.kwargs.layer_scale=1e-5"]).model.kwargs == {"layer_scale": 1e-5}
    assert load_recipe(None, ["data.cache=off"]).data.cache is False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimiser.lr=1", r"unknown key optimiser\. Did you mean optimizer\?"),
        ("regularize.drop_pth=1", r"Did you mean regularize\.drop_path\?"),
        ("lr=1", r"unknown key lr\. Did you mean optimizer\.lr\?"),
        ("batchsize=1", r"Did you mean batch_size\?"),
        ("optimizer.learning_rate=1", "Known keys: name, lr"),
        (
            "optimizer.lr=fast",
            r"expected a number for optimizer\.lr, got 'fast'\. Leave it out for the default, 0\.001\.",
        ),
        ("epochs=1.5", r"expected an integer for epochs, got 1\.5\. Leave"),
        ("data.multi_label=maybe", r"expected true, false or null for data\.multi_label, got 'maybe'\. Leave"),
        ("data.cache=maybe", r"expected true, false or auto for data\.cache, got 'maybe'"),
        ("regularize.class_weights=equal", r"expected a list of numbers, balanced or null for regularize\.class_w"),
        ("data.mask_values=[a, 1]", r"expected a list of integers, a list of texts or null for .*got \['a', 1\]"),
        ("augment.scale=[1]", r"expected a list of 2 numbers for augment\.scale, got \[1\]"),
        (
            "optimizer.lr_scale={head.: high}",
            r"expected keys with values for optimizer\.lr_scale, got \{'head\.': 'high'\}",
        ),
        ("schedule.min_lr=null", r"expected a number for schedule\.min_lr, got None"),
        ("trainer.precision=bf16", "expected 32-true, bf16-mixed or 16-mixed for trainer.precision, got 'bf16'"),
        (
            "data.interpolation=cubic",
            "expected bicubic, bilinear, nearest or lanczos for data.interpol",
        ),
        ("schedule=cosine", r"Set schedule\.KEY=VALUE"),
        ("epochs", "expected key=value"),
    ],
)
def test_wrong_setting_names_right_one(change, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(None, [change])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "optimizer.lr=.nan",
            r"expected finite numbers for optimizer\.lr, got nan\. Leave it out for the default, 0",
        ),
        ("optimizer.lr=-.inf", r"expected finite numbers for optimizer\.lr, got -inf\. Leave"),
        ("optimizer.weight_decay=1e999", r"expected finite numbers for optimizer\.weight_decay, got inf\. Leave"),
        ("augment.scale=[.nan, 1]", r"expected finite numbers for augment\.scale, got \(nan, 1\.0\)\. Leave"),
        ("optimizer.lr_scale={head.: .inf}", r"expected finite numbers for optimizer\.lr_scale, got \{'head\.': inf\}"),
        ("optimizer.kwargs.betas=[0.9, .nan]", r"expected finite numbers for optimizer\.kwargs, got \{'betas': \["),
        (
            "model.kwargs={a: {b: .nan}}",
            r"expected finite numbers for model\.kwargs, got \{'a': \{'b': nan\}\}",
        ),
        ("optimizer.lr=1" + 400 * "0", r"expected numbers below 1e308, got a larger one\. Lower it"),
        ("epochs=0", r"expected a number of at least 1 for epochs, got 0\. Leave it out for the default, 10\."),
        ("batch_size=-4", r"expected a number of at least 1 for batch_size, got -4\. Leave it out for the default, 64"),
        ("trainer.devices=0", r"expected a number of at least 1 for trainer\.devices, got 0"),
        ("seed=1" + 30 * "0", r"expected a number from 0 to 2\^63 - 1 for seed, got 1000"),
        ("data.views=[0, 3]", r"expected a number of at least 1 for data\.views, got \(0, 3\)"),
        ("optimizer.lr=-1e-3", r"expected a number of at least 0 for optimizer\.lr, got -0\.001\. Leave"),
        ("optimizer.weight_decay=-1", r"expected a number of at least 0 for optimizer\.weight_decay, got -1\.0"),
        (
            "optimizer.lr_scale={head.: -1}",
            r"expected a number of at least 0 for optimizer\.lr_scale, got \{'head\.'",
        ),
        ("distill.temperature=0", r"expected a number above 0 for distill\.temperature, got 0\.0"),
        ("distill.weight=2", r"expected a number between 0 and 1 for distill\.weight, got 2\.0\. Leave"),
        ("augment.flip=1.1", r"expected a number between 0 and 1 for augment\.flip, got 1\.1\. Leave"),
        ("ema.decay=1", r"expected a number of at least 0 and below 1 for ema\.decay, got 1\.0\. Leave"),
        ("regularize.label_smoothing=1", r"of at least 0 and below 1 for regularize\.label_smoothing, got 1\.0"),
        ("regularize.drop_path=-0.1", r"of at least 0 and below 1 for regularize\.drop_path, got -0\.1"),
    ],
)
def test_impossible_number_is_refused(change, words, tmp_path):
    with pytest.raises(RecipeError, match=words) as from_change:
        load_recipe(None, [change])
    assert "\n" not in str(from_change.value)
    key, _, value = change.partition("=")
    for name in reversed(key.split(".")):
        value = f"{{{name}: {value}}}"
    (tmp_path / "a.yaml").write_text(value)
    with pytest.raises(RecipeError, match=words):
        load_recipe(tmp_path / "a.yaml")


def test_impossible_number_is_refused_in_python(tmp_path):
    with pytest.raises(RecipeError, match=r"expected finite numbers for optimizer\.lr, got nan"):
        saccade.train(model="svit_nano", data="scenes", out=tmp_path / "run", lr=float("nan"))
    with pytest.raises(RecipeError, match=r"expected finite numbers for optimizer\.lr, got inf"):
        Recipe(optimizer=Optimizer(lr=float("inf")))
    assert list(tmp_path.iterdir()) == []


def test_numbers_at_the_ends_of_their_ranges_are_accepted():
    load_recipe(None, ["epochs=1", "schedule.warmup_epochs=5", "optimizer.lr=0", "augment.flip=1", "augment.erase=0",
                       "regularize.drop_path=0.999", "ema.decay=0.99999", "data.workers=0"])  # fmt: skip


def test_every_number_of_a_recipe_has_one_range():
    """Except for values in mask files, which are any integers."""
    ranged = [key for *_, keys in RANGES for key in keys.split()]
    rows = (Path(__file__).parents[2] / "docs/recipe_keys.md").read_text().splitlines()
    numeric = {row.split("`")[1] for row in rows if re.match(r"\| `[\w.]+` \| `[^`]*\b(int|float)\b", row)}
    assert len(numeric) > 40
    assert sorted(ranged) == sorted(numeric - {"data.ignore_index", "data.mask_values"})


def test_change_without_a_value_removes_a_text():
    assert not load_recipe({"augment": {"custom": "a.b"}}, ["augment.custom="]).augment.custom


def test_message_of_a_wrong_type_is_one_short_line():
    with pytest.raises(RecipeError) as caught:
        load_recipe({"data": {"limit": "ten\n" * 1000}})
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_mixup_needs_even_batch():
    with pytest.raises(RecipeError, match="must be even"):
        load_recipe(None, ["augment.mixup=1", "batch_size=33"])


def test_error_in_file_names_file(tmp_path):
    (tmp_path / "a.yaml").write_text("optimizer: {momentun: 0.9}")
    with pytest.raises(RecipeError, match=r"Did you mean optimizer\.momentum"):
        load_recipe(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("epochs: [")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_text("just words")
    with pytest.raises(RecipeError, match="is not a recipe"):
        load_recipe(tmp_path / "c.yaml")
    with pytest.raises(RecipeError, match="no recipe at"):
        load_recipe(tmp_path / "d.yaml")


def test_yaml_round_trip(tmp_path):
    recipe = load_recipe(None, ["optimizer.kwargs.betas=[0.9, 0.98]", "optimizer.weight_decay=1e-8", "data.path=x"])
    (tmp_path / "r.yaml").write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / "r.yaml") == recipe == load_recipe(to_dict(recipe))


def test_recipe_names():
    """The exact set of recipes, so that a parametrised test over an empty list cannot pass."""
    tiny_to_base, small_to_large = ("tiny", "small", "base"), ("small", "base", "large")
    nano = ("svit_nano", "paca_nano", "sparseformer_nano", "vt_nano")
    names = {f"imagenet/svit_{size}{end}" for size in small_to_large for end in ("", "_384")}
    names |= {f"imagenet/{family}_{size}" for family in ("paca", "sparseformer") for size in tiny_to_base}
    names |= {f"imagenet/sparseformer_base_{end}" for end in ("21k", "21k_finetune", "more_tokens")}
    names |= {"imagenet/vt_resnet18", "imagenet/vt_resnet18_advanced"}
    paca = (*tiny_to_base, "mlp_small", "ec_small", "ec_base")
    names |= {f"ade20k/paca_{size}_paca" for size in paca} | {f"ade20k/paca_{size}_upernet" for size in tiny_to_base}
    names |= {"ade20k/svit_base_upernet", "ade20k/sparseformer_tiny_sparse"}
    names |= {f"coco/paca_{size}_mask_rcnn" for size in paca}
    names |= {f"coco/svit_{size}_mask_rcnn{end}" for size in ("small", "base") for end in ("", "_3x")}
    names |= {"coco/svit_base_cascade_mask_rcnn_3x", "coco/sparseformer_small_sparse", "coco/resnet50_vt_fpn_stuff"}
    names |= {"lip/resnet50_vt_fpn"} | {f"kinetics/video_sparseformer_{size}" for size in tiny_to_base}
    names |= {f"small/{model}_{data}" for model in (*nano, "vt_resnet18") for data in ("cifar10", "tiny_imagenet")}
    names |= {f"small/{model}_tiny_imagenet_distilled" for model in nano}
    camvid = ("paca_nano_paca", "paca_tiny_paca", "svit_small_upernet", "resnet50_fpn", "resnet50_vt_fpn")
    names |= {f"small/{model}_camvid" for model in (*camvid, "sparseformer_tiny_sparse")}
    nuclei = ("svit_small_mask_rcnn", "paca_tiny_mask_rcnn", "sparseformer_tiny_sparse")
    names |= {f"small/{model}_nuclei" for model in nuclei}
    scenes = ("svit_nano", "svit_nano_mask_rcnn", "svit_nano_cascade_mask_rcnn", "sparseformer_nano_sparse")
    names |= {f"small/{model}_scenes" for model in scenes} | {"small/video_sparseformer_nano_motions"}
    names |= {"small/vit_cifar10", "small/vit_cifar10_bootstrap"}
    assert {str(path.relative_to(RECIPES).with_suffix("")) for path in FILES} == names
    assert len({path.stem for path in FILES}) == len(FILES) == 75, "the command line finds recipes by bare name"


@pytest.mark.shows("X-04")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recipe_has_header_and_builds(path):
    text = path.read_text()
    for word in ("# source ", "# command ", "# hardware ", "# expected "):
        assert word in text, f"{path.name} needs a header line {word!r}"
    assert f"saccade train {path.relative_to(RECIPES.parent)} " in text
    recipe = load_recipe(path)
    assert recipe.epochs * recipe.batch_size > 0
    if recipe.task == "segmentation":
        build_segmenter(recipe)
        return
    if recipe.task == "detection":
        build_detector(recipe)
        return
    regularize = recipe.regularize
    with torch.device("meta"):
        model = saccade.create_model(
            recipe.model.name,
            num_classes=10,
            drop_path_rate=regularize.drop_path,
            drop_rate=regularize.dropout,
            **recipe.model.kwargs,
        )
        frames = [recipe.data.frames] if recipe.task == "video" else []
        assert model.eval()(torch.empty(1, 3, *frames, *[recipe.data.image_size] * 2)).shape == (1, 10)


def build_segmenter(recipe: Recipe) -> None:
    from saccade.engine.schedule import make_optimizer

    with torch.device("meta"):
        model = saccade.create_segmenter(
            recipe.model.name,
            recipe.model.head,
            10,
            backbone_kwargs=recipe.model.kwargs | {"drop_path_rate": recipe.regularize.drop_path},
            head_kwargs=recipe.model.head_kwargs,
        )
        assert model.eval()(torch.empty(1, 3, 64, 64)).shape == (1, 10, 64, 64)
    assert make_optimizer(model, recipe.optimizer, recipe.batch_size).param_groups


def build_detector(recipe: Recipe) -> None:
    from saccade.engine.schedule import make_optimizer

    model = recipe.model
    with torch.device("meta"):
        built = saccade.create_detector(
            model.name,
            model.head,
            10,
            backbone_kwargs=model.kwargs | {"drop_path_rate": recipe.regularize.drop_path},
            **model.head_kwargs,
        )
        built.eval().dry_run(torch.empty(1, 3, 64, 64))
    assert make_optimizer(built, recipe.optimizer, recipe.batch_size).param_groups


# The papers' values; learning rates are effective ones at the recipe's batch size.
PRINTED = {
    "imagenet/vt_resnet18": dict(epochs=90, batch=256, lr=0.1, decay=4e-5, ids="VT-51"),
    "imagenet/vt_resnet18_advanced": dict(epochs=400, batch=2048, lr=0.16, decay=1e-5, warmup=5, ids="VT-52 VT-53"),
    "imagenet/svit_small": dict(epochs=300, batch=1024, lr=1e-3, decay=0.05, warmup=5, drop=0.1, ids="SVIT-40 SVIT-42"),
    "imagenet/svit_base": dict(epochs=300, batch=1024, lr=1e-3, decay=0.05, warmup=5, drop=0.4, ids="SVIT-42"),
    "imagenet/svit_large": dict(epochs=300, batch=1024, lr=1e-3, decay=0.05, warmup=5, drop=0.6, ids="SVIT-42"),
    "imagenet/svit_small_384": dict(epochs=30, batch=512, lr=5e-6, decay=1e-8, ids="SVIT-44"),
    "imagenet/paca_small": dict(epochs=300, batch=1024, lr=1e-3, decay=0.05, warmup=5, drop=0.1, ids="PACA-57"),
    "imagenet/paca_base": dict(epochs=300, batch=1024, lr=1e-3, decay=0.05, warmup=5, drop=0.5, ids="PACA-36 PACA-57"),
    "imagenet/sparseformer_tiny": dict(
        epochs=300, batch=1024, lr=1e-3, decay=0.05, warmup=20, drop=0.2, ids="SF-49 SF-50"
    ),
    "imagenet/sparseformer_base_21k": dict(epochs=60, batch=4096, lr=2e-3, decay=0.05, drop=0.1, ids="SF-52"),
    "imagenet/sparseformer_base_21k_finetune": dict(epochs=30, batch=1024, lr=2e-4, decay=1e-8, ids="SF-52"),
    "kinetics/video_sparseformer_tiny": dict(epochs=50, batch=256, lr=5e-4, decay=0.05, warmup=5, ids="SF-64"),
    "ade20k/svit_base_upernet": dict(epochs=127, batch=16, lr=6e-5, decay=0.01, drop=0.3, ids="SVIT-51"),
    "ade20k/paca_small_paca": dict(epochs=127, batch=16, lr=6e-5, decay=0.01, drop=0.1, ids="PACA-64"),
    "ade20k/paca_base_paca": dict(epochs=127, batch=16, lr=6e-5, decay=0.01, drop=0.5, ids="PACA-64"),
    "ade20k/paca_ec_small_paca": dict(epochs=127, batch=16, lr=6e-5, decay=0.01, drop=0.1, ids="PACA-64"),
    "ade20k/paca_base_upernet": dict(epochs=127, batch=16, lr=6e-5, decay=0.01, drop=0.1, ids="PACA-64"),
    "coco/resnet50_vt_fpn_stuff": dict(epochs=24, batch=32, lr=0.04, decay=1e-4, ids="VT-70"),
    "lip/resnet50_vt_fpn": dict(epochs=150, batch=96, lr=0.01, decay=5e-4, ids="VT-71"),
}


@pytest.mark.shows(
    "VT-51",
    "VT-52",
    "VT-53",
    "VT-70",
    "VT-71",
    "SVIT-40",
    "SVIT-42",
    "SVIT-44",
    "SVIT-51",
    "PACA-36",
    "PACA-57",
    "PACA-64",
    "SF-49",
    "SF-50",
    "SF-52",
    "SF-64",
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.shows(*values["ids"].split())) for name, values in PRINTED.items()]
)
def test_recipe_matches_paper(name):
    from saccade.engine.schedule import learning_rate

    recipe: Recipe = load_recipe(RECIPES / f"{name}.yaml")
    printed = PRINTED[name]
    assert (recipe.epochs, recipe.batch_size) == (printed["epochs"], printed["batch"])
    assert learning_rate(recipe.optimizer, recipe.batch_size) == pytest.approx(printed["lr"])
    assert recipe.optimizer.weight_decay == printed["decay"]
    assert recipe.schedule.warmup_epochs == printed.get("warmup", recipe.schedule.warmup_epochs)
    assert recipe.regularize.drop_path == printed.get("drop", recipe.regularize.drop_path)


@pytest.mark.shows("SVIT-41", "PACA-58", "SF-50")
def test_deit_augmentation():
    for name in ("imagenet/svit_small", "imagenet/paca_small", "imagenet/sparseformer_tiny"):
        recipe = load_recipe(RECIPES / f"{name}.yaml")
        augment = recipe.augment
        assert (augment.auto_augment, augment.mixup, augment.cutmix) == ("rand-m9-mstd0.5-inc1", 0.8, 1.0)
        assert (augment.erase, recipe.regularize.label_smoothing) == (0.25, 0.1)


@pytest.mark.shows("VT-54", "VT-55", "VT-56", "VT-57")
def test_vt_advanced_recipe():
    """VT Sec. 5.2: AutoAugment, stochastic depth 0.1, dropout 0.2, EMA 0.99985, distillation 0.8 / 0.2."""
    recipe = load_recipe(RECIPES / "imagenet/vt_resnet18_advanced.yaml")
    assert (recipe.augment.auto_augment, recipe.regularize.drop_path, recipe.regularize.dropout) == (
        "original",
        0.1,
        0.2,
    )
    assert (recipe.ema.decay, recipe.distill.weight, recipe.trainer.sync_batchnorm) == (0.99985, 0.8, True)
    assert recipe.optimizer.name == "rmsproptf"


@pytest.mark.shows("PACA-64", "VT-70")
def test_segmentation_schedules():
    """PaCa: 160k steps of 16 among 20,210 images, 1500 of warm-up, then linear decay to 0."""
    from tests.engine.test_schedule import rates

    recipe = load_recipe(RECIPES / "ade20k/paca_small_paca.yaml")
    steps = 20_210 // recipe.batch_size
    assert recipe.epochs * steps == pytest.approx(160_000, rel=0.005)
    assert recipe.schedule.warmup_epochs * steps == pytest.approx(1500, rel=0.005)
    assert rates(recipe.schedule, 6e-5, 127, [0, 63.5, 127]) == pytest.approx([6e-11, 3e-5, 0.0], abs=1e-12)
    stuff = load_recipe(RECIPES / "coco/resnet50_vt_fpn_stuff.yaml")
    steps = 118_287 / stuff.batch_size  # detectron2's 1x: 90k steps, a tenth of the rate after 60k and 80k
    assert stuff.epochs * steps == pytest.approx(90_000, rel=0.02)
    assert [epoch * steps for epoch in stuff.schedule.milestones] == pytest.approx([60_000, 80_000], rel=0.005)
    assert rates(stuff.schedule, 0.04, 24, [1, 16.1, 16.2, 21.5, 21.6, 24]) == pytest.approx(
        [0.04, 0.04, 0.004, 0.004, 0.0004, 0.0004]
    )


@pytest.mark.shows("PACA-64")
@pytest.mark.parametrize(("name", "layers"), [("paca_tiny", 3), ("paca_mlp_small", 3 * 2), ("paca_ec_small", 4 * 2)])
def test_new_layers_of_paca_have_ten_times_the_learning_rate(name, layers):
    """The head, and the last clustering layers (weights and biases), of the teacher if there is one."""
    from saccade.engine.schedule import make_optimizer

    recipe = load_recipe(RECIPES / f"ade20k/{name}_paca.yaml")
    with torch.device("meta"):
        model = saccade.create_segmenter(name, "paca")
    groups = make_optimizer(model, recipe.optimizer, 16).param_groups
    scales = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    scaled = {name for name, parameter in model.named_parameters() if scales[id(parameter)] == 10}
    assert all(name.startswith("head.") or "to_score" in name for name in scaled)
    assert len([name for name in scaled if name.startswith("backbone.")]) == layers
    assert {name for name, _ in model.head.named_parameters()} == {n[5:] for n in scaled if n.startswith("head.")}
    assert all(decays[id(p)] == (0.01 if p.ndim > 1 else 0) for p in model.parameters())
    with pytest.raises(RecipeError, match="no parameter name starts with 'nothing"):
        make_optimizer(model, dataclasses.replace(recipe.optimizer, lr_scale={"nothing.": 2.0}), 16)


def test_segmentation_needs_a_head():
    with pytest.raises(RecipeError, match="segmentation needs model"):
        load_recipe(None, ["task=segmentation"])


MULTI_SCALE = list(range(480, 801, 32))  # shorter sides


@pytest.mark.shows("PACA-60", "PACA-61", "SVIT-47", "SVIT-48")
@pytest.mark.parametrize(
    ("name", "epochs", "milestones", "sides", "drop", "crop"),
    [
        ("coco/paca_tiny_mask_rcnn", 12, [8, 11], MULTI_SCALE, 0.1, "detr"),
        ("coco/paca_base_mask_rcnn", 12, [8, 11], MULTI_SCALE, 0.1, "detr"),
        ("coco/svit_small_mask_rcnn", 12, [8, 11], 800, 0.1, "none"),
        ("coco/svit_small_mask_rcnn_3x", 36, [27, 33], MULTI_SCALE, 0.1, "none"),
        ("coco/paca_ec_small_mask_rcnn", 12, [8, 11], MULTI_SCALE, 0.1, "detr"),
        ("coco/svit_base_mask_rcnn", 12, [8, 11], 800, 0.3, "none"),
        ("coco/svit_base_mask_rcnn_3x", 36, [27, 33], MULTI_SCALE, 0.3, "none"),
        ("coco/svit_base_cascade_mask_rcnn_3x", 36, [27, 33], MULTI_SCALE, 0.3, "none"),
    ],
)
def test_detection_recipes(name, epochs, milestones, sides, drop, crop):
    """AdamW 1e-4, weight decay 0.05, batch 16, 500 steps of warm-up; longer side at most 1333."""
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.optimizer.weight_decay) == ("adamw", 1e-4, 0.05)
    assert (recipe.epochs, recipe.batch_size, recipe.schedule.milestones) == (epochs, 16, milestones)
    assert recipe.schedule.warmup_epochs * 118_287 / 16 == pytest.approx(500, rel=0.01)
    assert (recipe.model.head_kwargs["min_size"], recipe.model.head_kwargs["max_size"]) == (sides, 1333)
    assert (recipe.regularize.drop_path, recipe.augment.crop) == (drop, crop)
    assert ("cascade" in recipe.model.head) == ("cascade" in name)


@pytest.mark.shows("SF-67", "SF-69")
def test_sparse_detector_is_trained_like_detr():
    recipe = load_recipe(RECIPES / "coco/sparseformer_small_sparse.yaml")
    assert recipe.epochs == 300
    assert (recipe.model.head_kwargs["num_tokens"], recipe.model.head_kwargs["detect_tokens"]) == (400, 100)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.optimizer.clip_grad) == (1e-4, 1e-4, 0.1)


def test_effective_learning_rates_are_noted():
    """A recipe with reference_batch has the effective rate as a comment on that line."""
    from saccade.engine.schedule import learning_rate

    scaled = [path for path in FILES if "reference_batch" in path.read_text()]
    assert len(scaled) == 9
    for path in scaled:
        recipe = load_recipe(path)
        (line,) = [line for line in path.read_text().splitlines() if "reference_batch" in line]
        assert float(line.rpartition("# effective lr ")[2]) == learning_rate(recipe.optimizer, recipe.batch_size)


def test_deep_nesting_is_refused():
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(None, ["model.kwargs=" + "[" * 20_000 + "]" * 20_000])
