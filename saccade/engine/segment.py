"""Segmentation in the loop: pictures and masks, the loss a pixel, mIoU."""

from html import escape
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from saccade.data.decode.image import BadImage
from saccade.data.loader import Batch, EvalLoader, FileLoader, MemoryEvalLoader, decode_all, seed_all
from saccade.data.open import open_train_and_val_masks
from saccade.data.sources.base import DataError
from saccade.data.sources.class_names import flipped_classes
from saccade.data.sources.masks import MaskSource, load_pair, read_pair
from saccade.data.transforms.batch import normalize
from saccade.data.transforms.mask import EvalPair, TrainPair
from saccade.data.transforms.mask_batch import PairAugment
from saccade.engine.evaluate_masks import MaskEvaluation, answer, evaluate_segmenter, look_at
from saccade.engine.feed import BadPictures, Feed, Share, Sources, memory_feed
from saccade.engine.module import Assembly, Training
from saccade.engine.recipe import Data, Recipe
from saccade.engine.report import classes_section, figure, gallery
from saccade.inference.compiling import compiling
from saccade.models.card import Card, preprocess_of
from saccade.tasks.inference import Inference
from saccade.tasks.segmentation import IGNORE, Scores, create_segmenter, pixel_loss, segmentation_metric
from saccade.tasks.segments import class_colours, overlay

SIZE = 512  # side of a training crop, unless the recipe says otherwise
MEMORY = 4 * 2**30  # sets up to this size, decoded, are kept on the device


class Segment(Training):
    """One run of one recipe for semantic segmentation."""

    score = "miou"
    trained = ("loss", "aacc")
    validated = ("loss", "miou", "macc", "aacc")

    def __init__(self, *args: Any):
        super().__init__(*args)
        recipe, classes = self.recipe, self.sources.classes
        self.metric = segmentation_metric(len(classes))
        self.how = Inference(window=recipe.data.val_window)
        self.augment = None
        if self.sources.train_memory is not None:
            options = pair_options(recipe, self.sizes.size, classes)
            self.augment = PairAugment(mean=self.sizes.mean, std=self.sizes.std, **options)

    @classmethod
    def assemble(cls, recipe: Recipe) -> Assembly:
        seed_all(recipe.seed)
        wanted, regularize = recipe.model, recipe.regularize
        kwargs = dict(wanted.kwargs)
        if regularize.drop_path:
            kwargs["drop_path_rate"] = regularize.drop_path
        options = dict(wanted.head_kwargs)
        if regularize.dropout:
            options["dropout"] = regularize.dropout
        sources = open_mask_sources(recipe.data, recipe.data.image_size or SIZE, recipe.seed)
        model = create_segmenter(
            wanted.name,
            wanted.head,
            len(sources.classes),
            wanted.pretrained,
            backbone_kwargs=kwargs,
            head_kwargs=options,
            checkpoint=wanted.checkpoint,
        )
        sizes = preprocess_of(model.trunk)._replace(size=recipe.data.image_size or SIZE, crop_pct=1.0)
        card = Card(
            wanted.name,
            len(sources.classes),
            dict(wanted.kwargs),
            sources.classes,
            sizes,
            "segmentation",
            wanted.head,
            dict(wanted.head_kwargs),
            recipe.data.val_size,
        )
        return Assembly(model, card, sources, sizes)

    def compile_model(self, mode: str | None) -> None:
        """Part by part: training enters by `loss`, not by the front door."""
        self.model.backbone.compile(**compiling(mode))
        self.model.head.compile(**compiling(mode))

    def make_feed(self, share: Share) -> Feed:
        kept, sources, order = memory_feed(self.sources, share), self.sources, share.order
        if kept is not None:
            return kept
        change = TrainPair(mean=self.sizes.mean, **pair_options(self.recipe, self.sizes.size, sources.classes))
        train = FileLoader(sources.train, change, order, share.workers, share.pin, load_pair)
        return Feed(order, train, self.val_loader(share.workers, order.rank, order.world_size, share.pin))

    def val_loader(self, workers: int | None, rank: int = 0, world: int = 1, pin: bool = False) -> EvalLoader:
        """One by one, as every picture may have its own size."""
        return EvalLoader(self.sources.val, EvalPair(), 1, workers, rank, world, pin, load_pair)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """uint8 pictures and masks -> augmented, normalised pictures (B, 3, S, S) and masks (B, S, S)."""
        with torch.autocast(self.device.type, enabled=False):
            if self.augment is not None:
                images, masks = self.augment(batch.images, batch.labels, self.dice)
            else:
                images = normalize(batch.images.float() / 255, self.sizes.mean, self.sizes.std)
                masks = batch.labels.long()
            return images.contiguous(memory_format=torch.channels_last), masks

    def learn(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        losses, logits = self.model.losses_and_logits(images, masks)
        with torch.no_grad():
            known = masks[:, ::4, ::4] != IGNORE  # a sixteenth of the pixels tells how it goes
            answers = torch.nn.functional.interpolate(logits, known.shape[1:], mode="nearest-exact").argmax(1)
            hits = ((answers == masks[:, ::4, ::4]) & known).sum() / known.sum().clamp(min=1)
        return torch.stack(list(losses.values())).sum(), hits

    def begin_validation(self) -> None:
        self.metric.reset()
        self.sums["val"] = torch.zeros(2, device=self.device)  # summed loss, pictures

    def validate(self, model: nn.Module, batch: Batch) -> None:
        masks = batch.labels.long()
        images = look_at(batch.images, self.sizes, self.recipe.data.val_size)
        shares = answer(model, images, masks.shape[1:], self.how, self.sources.classes)
        self.metric.update(shares.argmax(1), masks)
        loss = pixel_loss(shares.clamp(min=1e-9).log(), masks)
        self.sums["val"] += torch.stack([loss * len(masks), loss.new_tensor(len(masks))])

    def finish_validation(self) -> dict[str, float]:
        scores = Scores.of(self.metric.compute())
        total = self.trainer.strategy.reduce(self.sums["val"], reduce_op="sum")
        assert isinstance(total, Tensor)
        shares = {name: 100 * getattr(scores, name) for name in self.validated if name != "loss"}
        return {"loss": float(total[0] / total[1])} | shares

    def evaluate(self, model: nn.Module, device: torch.device) -> MaskEvaluation:
        recipe, memory = self.recipe, self.sources.val_memory
        batches: Any = (
            MemoryEvalLoader(memory.to(device), 8) if memory is not None else self.val_loader(recipe.data.workers)
        )
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(recipe.trainer.precision)
        return evaluate_segmenter(
            model, batches, self.sources.classes, self.sizes, recipe.data.val_size, self.how, device, dtype
        )

    def sections(self, model: nn.Module, evaluation: MaskEvaluation) -> list[tuple[str, str]]:
        shares = [None if share is None else 100 * share for share in evaluation.scores.iou]
        order = evaluation.hits.argsort()
        worst, best = (self.pictures(model, evaluation, chosen) for chosen in (order[:4], order[-4:].flip(0)))
        return [
            ("Classes", classes_section(shares, evaluation.confusion, self.sources.classes, "IoU")),
            ("Pictures it is most wrong about", legend(self.sources.classes) + worst),
            ("Pictures it is most right about", best),
        ]

    @torch.inference_mode()
    def pictures(self, model: nn.Module, evaluation: MaskEvaluation, chosen: Tensor) -> str:
        """Picture, answer and truth side by side."""
        source, colours = self.sources.val, class_colours(len(self.sources.classes))
        device = next(model.parameters()).device
        figures = []
        for number in chosen.tolist():
            index = int(evaluation.indices[number])
            try:
                image, mask = read_pair(source, index)
            except BadImage:
                continue
            pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].to(device)
            images = look_at(pixels, self.sizes, self.recipe.data.val_size)
            labels = answer(model, images, mask.shape, self.how, self.sources.classes).argmax(1)[0]
            right = f"answer, {100 * float(evaluation.hits[number]):.1f} % right"
            name, seen = source.name(index), np.asarray(image)
            figures.append(figure(image, name, "picture", 320))
            for own, text in ((labels.byte().cpu().numpy(), right), (mask, "truth")):
                figures.append(figure(Image.fromarray(overlay(seen, own, colours)), name, text, 320))
        return gallery(figures, 300)


def legend(classes: list[str]) -> str:
    """Which colour is which class, in HTML."""
    entries = (
        f'<span style="white-space:nowrap"><span style="color:rgb{tuple(colour)}">■</span> {escape(name)}</span>'
        for name, colour in zip(classes, class_colours(len(classes)).tolist(), strict=True)
    )
    return f'<p class="soft">{" ".join(entries)}</p>'


def pair_options(recipe: Recipe, size: int, classes: list[str]) -> dict[str, Any]:
    """What both kinds of augmentation are told."""
    augment = recipe.augment
    return {
        "size": size,
        "base": recipe.data.base_size,
        "scale": tuple(augment.resize),
        "max_class_fraction": augment.most,
        "flip": augment.flip,
        "distort": augment.distort,
        "flipped_classes": flipped_classes(classes),
    }


def open_mask_sources(data: Data, image_size: int, seed: int) -> Sources:
    """Open and check both sets, and decode them now if they are small and of one size."""
    if not data.path:
        raise DataError("no data: give --data PATH (pictures and masks in folders, or Parquet) or --data scenes.")
    train, val = open_train_and_val_masks(
        data.path,
        data.val_path,
        data.val_fraction,
        seed,
        layout=data.layout,
        classes=data.classes,
        ignore_index=data.ignore_index,
        reduce_zero_label=data.reduce_zero_label,
        image_column=data.image_column,
        mask_column=data.mask_column,
        scenes=data.scenes,
        size=image_size,
    )
    bad = BadPictures(data.max_bad)
    alike = data.cache is not False and one_size(train, val)
    if data.cache is True and not alike:
        raise DataError("data.cache=true keeps the pictures decoded, which must then all have one size: set it false.")
    if not alike or (data.cache == "auto" and memory_of(train) + memory_of(val) > MEMORY):
        return Sources(train, val, None, None, bad)
    memories = []
    for role, source in (("training", train), ("validation", val)):
        memory = decode_all(source, EvalPair(), data.workers, load_pair)
        bad.add(memory.bad, role)
        memories.append(memory)
    return Sources(train, val, memories[0], memories[1], bad)


def one_size(*sources: MaskSource) -> bool:
    """Whether a sample of the pictures has one size, in each source."""
    for source in sources:
        chosen = np.unique(np.linspace(0, len(source) - 1, num=min(32, len(source)), dtype=int)).tolist()
        sizes = set()
        for index in chosen:
            try:
                sizes.add(source.read(index).size)
            except BadImage:
                continue
        if len(sizes) != 1:
            return False
    return True


def memory_of(source: MaskSource) -> int:
    """Bytes of a source whose pictures have the size of its first."""
    width, height = source.read(0).size
    return len(source) * 4 * width * height
