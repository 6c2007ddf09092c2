"""Load weights into models, convert and write them. An error leaves the model unchanged."""

import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from saccade._files import replaced_file
from saccade.models.official import FAMILIES, convert, convert_parts, recognise
from saccade.models.registry import create_model, list_models
from saccade.weights.read import CheckpointError, read_state_dict, some, unwrap

_logger = logging.getLogger(__name__)

MIN_TENSORS = 20  # every registered model has more; fewer are not compared with all of them, which takes seconds


class LoadReport(NamedTuple):
    """Which tensors were loaded, and which were not."""

    source: str  # "saccade", or the family whose official layout was recognised
    loaded: int  # number of tensors loaded from the file
    new: dict[str, str]  # tensors of the model that keep their initial values -> reason
    ignored: tuple[str, ...]  # tensors of the file that the model does not have
    changed: dict[str, str]  # tensors loaded after a change -> what was changed

    def __str__(self) -> str:
        lines = [f"{self.loaded} tensors loaded from a {self.source} checkpoint"]
        for what, tensors in (("changed", self.changed), ("not loaded", self.new)):
            for reason in dict.fromkeys(tensors.values()):
                names = [name for name, why in tensors.items() if why == reason]
                lines.append(f"{len(names)} {what} ({reason}): {some(names)}")
        if self.ignored:
            lines.append(f"{len(self.ignored)} ignored: {some(self.ignored)}")
        return "; ".join(lines)


def load_checkpoint(model: nn.Module, source: str | os.PathLike | Mapping[str, Any], strict: bool = True) -> LoadReport:
    """Load a file (our safetensors, or an authors' .pth) or a state dict into `model`.

    The layout is recognised by its keys. All names and shapes are checked before anything is written. `strict=False`
    allows tensors to be missing; the report names them.

    Example:
        >>> model = saccade.create_model("vt_nano", num_classes=3)
        >>> saccade.save_checkpoint(model, "model.safetensors")
        >>> str(saccade.load_checkpoint(model, "model.safetensors")).split(" loaded")[0]
        '196 tensors'
    """
    target: Any = model.model if isinstance(model, FeatureGetterNet) else model
    state_dict, report = match_checkpoint(model, source, strict)
    target.load_state_dict(state_dict, strict=False)
    if report.new or report.ignored or report.changed:
        _logger.warning("%s", report)
    return report


def match_checkpoint(
    model: nn.Module, source: str | os.PathLike | Mapping[str, Any], strict: bool = True
) -> tuple[dict[str, Tensor], LoadReport]:
    """The tensors that `load_checkpoint` loads, under the model's names; the model may be on the meta device."""
    target: Any = model.model if isinstance(model, FeatureGetterNet) else model
    state_dict = read_state_dict(source)
    if hasattr(target, "backbone"):
        state_dict, family = convert_parts(state_dict, target)
    else:
        state_dict, family = recognise(state_dict)
        if family:
            state_dict = convert(family, state_dict, target)
    adapt = getattr(target, "adapt_checkpoint", lambda state_dict: (state_dict, {}))
    adapted, new, *changed = adapt(state_dict)  # changed: of video models only
    dropped = tuple(key for key in state_dict if key not in adapted and key not in new)
    state_dict, ignored = _drop_unused(adapted, model, target)
    missing = _compare(state_dict, target, new, strict)
    layout = f"{family} (official)" if family else "saccade"
    return state_dict, LoadReport(
        layout, len(state_dict), new | missing, dropped + ignored, changed[0] if changed else {}
    )


def convert_official(state_dict: Mapping[str, Any], name: str, **kwargs: Any) -> dict[str, Tensor]:
    """Convert an authors' state dict to the layout of `create_model(name, **kwargs)`, without changing the input."""
    official, family = recognise(unwrap(state_dict))
    if not family:
        raise CheckpointError(f"expected an official state dict of {', '.join(FAMILIES)}, got {some(official)}.")
    with torch.device("meta"):  # only names and head counts are needed
        model: Any = create_model(name, **kwargs)
    converted = convert(family, official, model)
    return model.adapt_checkpoint(converted)[0] if hasattr(model, "adapt_checkpoint") else converted


def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike,
    metadata: Mapping[str, str] | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the weights as safetensors, atomically.

    A model of `saccade.load` or `saccade.bootstrap` is saved with its card. `state_dict` replaces `model.state_dict()`
    where the weights have to be gathered first.

    Example:
        >>> saccade.save_checkpoint(saccade.create_model("vt_nano", num_classes=3), "model.safetensors")
        >>> saccade.load("model.safetensors").num_classes
        3
    """
    card: Any = getattr(model, "card", None)
    classes: Any = getattr(model, "num_classes", None)
    if card and classes is not None and classes != card.num_classes:  # after reset_classifier
        card = card._replace(num_classes=classes, classes=[])
    entries = {"format": "pt"} | (card.metadata() if card else {}) | dict(metadata or {})
    name = getattr(getattr(model, "pretrained_cfg", None), "get", lambda _: None)("architecture")
    if name:
        entries.setdefault("saccade.model", name)
        entries.setdefault("saccade.num_classes", str(model.num_classes))
    tensors = {key: value.detach().cpu().contiguous() for key, value in (state_dict or model.state_dict()).items()}
    with replaced_file(path) as temporary:
        save_file(tensors, temporary, entries)


def identify(source: str | os.PathLike | Mapping[str, Any]) -> tuple[str, int]:
    """(name, number of classes) of the model in a checkpoint, from the names and shapes of its tensors."""
    state_dict, family = recognise(read_state_dict(source))
    if len(state_dict) < MIN_TENSORS:
        raise CheckpointError(f"no registered model has the tensors of this checkpoint: {some(state_dict)}")
    for name in list_models(f"*{family}*" if family else ""):
        with torch.device("meta"):
            model: Any = create_model(name)
        try:
            ours = convert(family, state_dict, model) if family else state_dict
        except CheckpointError:
            continue
        with torch.device("meta"):
            classifier = model.pretrained_cfg["classifier"] + ".weight"
            classes = ours[classifier].shape[0] if classifier in ours else 0
            model.reset_classifier(classes)
        expected = {key: value.shape for key, value in model.state_dict().items()}
        if expected == {key: value.shape for key, value in ours.items()}:
            return name, classes
    raise CheckpointError(f"no registered model has the tensors of this checkpoint: {some(state_dict)}")


def _drop_unused(
    state_dict: dict[str, Tensor], model: nn.Module, target: nn.Module
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Drop what this model was built without: its classifier, or everything after the features."""
    expected = target.state_dict()
    unused: tuple[str, ...] = ("head.auxiliary",)
    if model is not target:  # features only
        unused = ("",)
    elif getattr(target, "num_classes", None) == 0:
        unused += (_classifier(target) + ".",)
    ignored = tuple(key for key in state_dict if key not in expected and key.startswith(unused))
    return {key: value for key, value in state_dict.items() if key not in ignored}, ignored


def _compare(state_dict: dict[str, Tensor], target: nn.Module, new: dict[str, str], strict: bool) -> dict[str, str]:
    """Check every name and shape; return what `strict=False` leaves at its initial values."""
    expected = target.state_dict()
    name = getattr(target, "pretrained_cfg", {}).get("architecture", type(target).__name__)
    unexpected = [key for key in state_dict if key not in expected]
    missing = [key for key in expected if key not in state_dict and key not in new]
    if not set(state_dict) & set(expected):
        raise CheckpointError(
            f"expected a checkpoint of {name} or of {', '.join(FAMILIES)}, got tensors {some(state_dict)}."
        )
    for key in (key for key in expected if key in state_dict):
        theirs, ours = tuple(state_dict[key].shape), tuple(expected[key].shape)
        if theirs != ours:
            is_class_layer = key.startswith(getattr(target, "class_layers", ()))
            if theirs[:1] != ours[:1] and (is_class_layer or key.startswith(_classifier(target))):
                partly = "or load what matches: create_segmenter(..., checkpoint=...)"
                then = f"load, then model.reset_classifier({ours[0]})"
                raise CheckpointError(
                    f"the checkpoint has {theirs[0]} classes, the model {ours[0]}. Create the model with "
                    f"num_classes={theirs[0]}, {partly if is_class_layer else then}."
                )
            raise CheckpointError(
                f"expected {key} of shape {ours} for {name}, got {theirs}. Use the same size and options."
            )
    if unexpected:
        raise CheckpointError(f"{name} does not have {some(unexpected)}: another size, or other options?")
    if missing and strict:
        raise CheckpointError(
            f"the checkpoint lacks {some(missing)} of {name}. For a backbone file, create the model with "
            "features_only=True or num_classes=0, or load with strict=False."
        )
    return dict.fromkeys(missing, "not in the checkpoint")


def _classifier(model: nn.Module) -> str:
    """The name of the last layer, as timm's configuration has it."""
    return getattr(model, "pretrained_cfg", {}).get("classifier", "head.fc")
