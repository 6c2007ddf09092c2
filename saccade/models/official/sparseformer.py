"""SparseFormer (v1) state dicts: names only, the layouts agree.

The authors' current code and their older files spell the head differently (`norm` and `proj`, or `head.norm`), and
their loader ignores unknown keys.

Video models have the same names. Their early convolution has a time axis of 1, which is dropped: here it is a
convolution of single frames. Boxes x1 y1 t1 x2 y2 t2 and offsets x y t have our layout; of the six deltas, the three
shifts precede the three growths, as two precede two in the image model.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

_logger = logging.getLogger(__name__)

_BLOCK = {  # inside a transformer block
    "roi_offset_bias": "tokenizer.placer.grid",
    "roi_offset_module.0.": "tokenizer.placer.norm.",
    "roi_offset_module.1.weight": "tokenizer.placer.to_offset.weight",
    "roi_adjust_module.0.": "tokenizer.adjuster.norm.",
    "roi_adjust_module.1.weight": "tokenizer.adjuster.to_delta.weight",
    "adaptive_mixing.m_beta": "tokenizer.decoder.channel_bias",
    "adaptive_mixing.s_beta": "tokenizer.decoder.point_bias",
    "adaptive_mixing.parameter_generator.0.": "tokenizer.decoder.norm.",
    "adaptive_mixing.parameter_generator.1.": "tokenizer.decoder.to_hidden.",
    "adaptive_mixing.parameter_generator.2.": "tokenizer.decoder.to_weights.",
    "adaptive_mixing.out_proj.": "tokenizer.decoder.proj.",
    "norm1.": "norm1.",
    "norm2.": "norm2.",
    "attn.qkv.": "attn.qkv.",
    "attn.proj.": "attn.proj.",
    "mlp.fc1.": "mlp.fc1.",
    "mlp.fc2.": "mlp.fc2.",
}
_OUTSIDE = {
    r"feat_extractor\.conv1\.": "stem.conv.",
    r"initial_roi\.weight$": "regions",
    r"initial_embedding\.weight$": "embeddings",
    r"layers\.1\.([01])\.": r"bridge.\1.",
    r"(?:head\.)?norm\.": "head.norm.",
    r"(?:head\.)?(?:proj|fc)\.": "head.fc.",
}
_LAYER = re.compile(r"layers\.(\d+)\.")
Parts = list[tuple[str, dict[str, str]]]  # prefix and names of a layer's parts


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the keys of an official SparseFormer."""
    return any(key.startswith("initial_roi.") or key.endswith(".roi_offset_bias") for key in keys)


def convert(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename the authors' keys to ours; only the time axis of a video's convolution changes a value."""
    state_dict = {key: value.squeeze(2) if value.ndim == 5 else value for key, value in state_dict.items()}
    return rename_keys(state_dict, _OUTSIDE, _parts)


def _parts(index: int) -> Parts:
    return [(f"cortex.blocks.{index - 2}." if index > 1 else "focus.blocks.0.", _BLOCK)]


def rename_keys(
    state_dict: dict[str, Tensor], outside: Mapping[str, str], parts: Callable[[int], Parts]
) -> dict[str, Tensor]:
    """Rename keys by patterns outside of layers, and by prefix and names of the `parts` of layer i.

    Unknown keys are named in a warning and not dropped, so that strict loading fails.
    """
    names = {key: _rename(key, outside, parts) for key in state_dict}
    unknown = [key for key, name in names.items() if name is None]
    if unknown:
        _logger.warning("keys that a SparseFormer does not have: %s", ", ".join(unknown))
    return {name or key: state_dict[key] for key, name in names.items()}


def _rename(key: str, outside: Mapping[str, str], parts: Callable[[int], Parts]) -> str | None:
    for pattern, ours in outside.items():
        if re.match(pattern, key):
            return re.sub("^" + pattern, ours, key)
    if layer := _LAYER.match(key):
        suffix = key[layer.end() :]
        for prefix, names in parts(int(layer[1])):
            for theirs, ours in names.items():
                if suffix.startswith(theirs):
                    return prefix + ours + suffix[len(theirs) :]
    return None
