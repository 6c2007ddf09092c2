"""Detection in the loop: pictures and their objects, the detector's own losses, average precision."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade._extras import require
from saccade.data.decode.image import BadImage
from saccade.data.loader import ObjectBatch, ObjectEvalLoader, ObjectLoader, seed_all
from saccade.data.open import open_train_and_val_objects
from saccade.data.sources.base import DataError
from saccade.data.transforms.objects import TrainObjects, unpack_masks
from saccade.engine.evaluate_objects import ObjectEvaluation, evaluate_detector, metric_for
from saccade.engine.feed import BadPictures, Feed, Share, Sources
from saccade.engine.module import Assembly, Training
from saccade.engine.recipe import Data, Recipe
from saccade.engine.report import classes_section, figure, gallery
from saccade.inference.compiling import compiling
from saccade.models.card import Card, preprocess_of
from saccade.tasks.coco import CocoMetric
from saccade.tasks.detection import create_detector
from saccade.tasks.detections import draw_detections

SIZE = 128  # side of the embedded scenes, unless the recipe says otherwise
SHOWN = 6  # pictures of each kind in the report


class Detect(Training):
    """One run of one recipe for object detection and instance segmentation."""

    score = "box_ap"
    trained = ("loss",)
    validated = ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75")

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Pictures that were scaled and cut need no resizing in training; torchvision's switch for that.
        self.model.transform._skip_resize = self.recipe.augment.crop == "resized"
        self._metric: CocoMetric | None = None

    @classmethod
    def assemble(cls, recipe: Recipe) -> Assembly:
        seed_all(recipe.seed)
        wanted, data = recipe.model, recipe.data
        for module in ("pycocotools.cocoeval", *(("scipy.optimize",) if wanted.head == "sparse" else ())):
            require(module, "train")  # now, not when the first validation or matching comes
        sources = open_object_sources(data, recipe.seed)
        kwargs, options = dict(wanted.kwargs), dict(wanted.head_kwargs)
        if recipe.regularize.drop_path:
            kwargs["drop_path_rate"] = recipe.regularize.drop_path
        if wanted.head != "sparse" and not sources.train.has_masks:
            options.setdefault("masks", False)
        model = create_detector(
            wanted.name,
            wanted.head,
            len(sources.classes),
            wanted.pretrained,
            wanted.checkpoint,
            backbone_kwargs=kwargs,
            **options,
        )
        sizes = preprocess_of(model.trunk)._replace(size=data.image_size or SIZE, crop_pct=1.0)
        card = Card(
            wanted.name,
            len(sources.classes),
            dict(wanted.kwargs),
            sources.classes,
            sizes,
            "detection",
            wanted.head,
            options,
        )
        return Assembly(model, card, sources, sizes)

    def compile_model(self, mode: str | None) -> None:
        """The backbone alone: what comes behind it changes with the objects of every picture."""
        self.model.trunk.compile(**compiling(mode))

    def make_feed(self, share: Share) -> Feed:
        augment, order = self.recipe.augment, share.order
        change = TrainObjects(
            self.recipe.data.image_size,
            augment.crop,
            tuple(augment.resize),
            augment.flip,
            augment.vertical_flip,
            augment.jitter,
        )
        train = ObjectLoader(self.sources.train, change, order, share.workers, share.pin)
        val = ObjectEvalLoader(self.sources.val, share.pictures, share.workers, order.rank, order.world_size, share.pin)
        return Feed(order, train, val)

    def prepare(self, batch: ObjectBatch) -> tuple[list[Tensor], Any]:
        """uint8 pictures -> pictures from 0 to 1; the detector resizes and normalises them itself."""
        targets = []
        for image, target in zip(batch.images, batch.labels, strict=True):
            masks = {"masks": unpack_masks(target["masks"], image.shape[-1])} if "masks" in target else {}
            targets.append(target | masks)
        return [image.float() / 255 for image in batch.images], targets

    def learn(self, images: list[Tensor], targets: Any) -> tuple[Tensor]:
        losses = self.model(images, targets)
        return (torch.stack([loss.float() for loss in losses.values()]).sum(),)

    @property
    def metric(self) -> CocoMetric:
        """Made when it is first needed: it reads the whole set."""
        if self._metric is None:
            self._metric = metric_for(self.model, self.sources.val, self.recipe.data.max_detections)
        return self._metric

    def begin_validation(self) -> None:
        self.metric.reset()

    def validate(self, model: nn.Module, batch: ObjectBatch) -> None:
        images, _ = self.prepare(batch)
        ids = self.sources.val.image_ids[batch.indices.cpu().numpy()].tolist()
        self.metric.update(model(images), ids)

    def finish_validation(self) -> dict[str, float]:
        self.metric.gather()
        found, kinds = self.metric.compute(by_size=False), self.metric.per_class  # "box", and perhaps "mask"
        return {name: 100 * found.get(name, 0.0) for name in self.validated if name.partition("_")[0] in kinds}

    def evaluate(self, model: nn.Module, device: torch.device) -> ObjectEvaluation:
        recipe, share = self.recipe, self.feed.order.batch_size // self.feed.order.accumulate // self.feed.order.world_size
        batches = ObjectEvalLoader(self.sources.val, share, recipe.data.workers, pin_memory=device.type == "cuda")
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(recipe.trainer.precision)
        found = evaluate_detector(model, batches, self.sources.val, self.metric, device, dtype)
        found.metric.write(self.out)
        return found

    def sections(self, model: nn.Module, evaluation: ObjectEvaluation) -> list[tuple[str, str]]:
        order = evaluation.hits.argsort()
        return [
            ("Classes", classes_section(evaluation.per_class, None, self.sources.classes, "Box AP")),
            ("Pictures it is most wrong about", self.pictures(model, evaluation, order[:SHOWN])),
            ("Pictures it is most right about", self.pictures(model, evaluation, order[-SHOWN:].flip(0))),
        ]

    @torch.inference_mode()
    def pictures(self, model: nn.Module, evaluation: ObjectEvaluation, chosen: Tensor) -> str:
        """What was found, beside the truth."""
        source, device = self.sources.val, next(model.parameters()).device
        figures = []
        for number in chosen.tolist():
            index = int(evaluation.indices[number])
            try:
                image = source.read(index)
            except BadImage:
                continue
            pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).to(device)
            answer = model([pixels.float() / 255])[0]
            objects = source.objects(index, image.size)
            truth = {
                "boxes": torch.from_numpy(objects.boxes),
                "labels": torch.from_numpy(objects.labels),
                "scores": torch.ones(len(objects.labels)),
            }
            if objects.masks is not None:
                truth["masks"] = torch.from_numpy(objects.masks)[:, None]
            text = f"found, {100 * float(evaluation.hits[number]):.0f} % right"
            for found, caption in ((answer, text), (truth, "truth")):
                drawn = draw_detections(image, found, source.classes, names=False)
                figures.append(figure(drawn, source.name(index), caption, 320))
        return gallery(figures, 300)


def open_object_sources(data: Data, seed: int) -> Sources:
    """Open and check both sets."""
    if not data.path:
        raise DataError("no data: give --data PATH (COCO's JSON or a folder with it, Parquet) or --data scenes.")
    train, val = open_train_and_val_objects(
        data.path,
        data.val_path,
        data.val_fraction,
        seed,
        image_column=data.image_column,
        scenes=data.scenes,
        size=data.image_size or SIZE,
    )
    if not len(train) or not len(val):
        raise DataError(f"the {'training' if not len(train) else 'validation'} set is empty.")
    return Sources(train, val, None, None, BadPictures(data.max_bad))
