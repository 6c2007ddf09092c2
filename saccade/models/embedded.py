"""Embedded weights as timm tags: `timm.create_model("svit_nano.tiny_imagenet", pretrained=True)`, offline.

Without a tag, `pretrained=True` uses the first embedded tag of a model.
"""

import logging
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError
from timm.models import _registry, get_pretrained_cfg, is_model

from saccade import weights
from saccade.models.card import read_card, timm_config

_logger = logging.getLogger(__name__)


def register_embedded() -> list[str]:
    """Add every classifier in the weights folder to timm's registry; return their names."""
    names = []
    for name, path in weights.embedded().items():
        try:
            card = read_card(path)
            if card.task != "classification":
                continue
            if not is_model(card.name):
                raise ValueError(f"unknown model {card.name}.")
            add_tag(card.name, name.rpartition(".")[2], file=str(path), **timm_config(card))
            names.append(name)
        except (ValueError, OSError, SafetensorError) as error:  # a damaged file must not break `import saccade`
            _logger.warning("skipping %s: %s", path, error)
    return names


def add_tag(name: str, tag: str, **fields: Any) -> None:
    """Add a tag of a registered model to timm's registry, or replace it; `fields` change the model's configuration."""
    full, default = f"{name}.{tag}", get_pretrained_cfg(name, allow_unregistered=False)
    assert default is not None
    config = replace(default, tag=tag, architecture=name, **fields)
    tags: Any = _registry._model_default_cfgs[name]  # timm declares a PretrainedCfg, and stores a DefaultCfg
    if tag not in tags.cfgs:
        tags.tags.append(tag)
        _registry._model_with_tags[name].append(full)
    tags.cfgs[tag] = _registry._model_pretrained_cfgs[full] = config
    if config.has_weights:
        _registry._model_has_pretrained |= {name, full}
