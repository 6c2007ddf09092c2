"""SparseFormer v2 state dicts (bootstrapped from AugReg or CLIP, base or large): names only, the layouts agree.

Files spell the head `norm` and `proj`, or `head.norm` and `head.classifier`. Strict loading fails without the stage
embedding, which the authors' own conversion of old files drops.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from saccade.models.official.sparseformer import Parts, rename_keys

_OUTSIDE = {
    r"feat_extractor\.conv1\.": "stem.conv.",
    r"initial_roi\.weight$": "regions",
    r"initial_embedding\.weight$": "embeddings",
    r"cls_embedding\.weight$": "class_token",
    r"layers\.0\.stage_embedding\.weight$": "focus.stage_embedding",
    r"layers\.1\.0\.": "bridge.",
    r"(?:head\.)?norm\.": "head.norm.",
    r"(?:head\.)?(?:proj|classifier|fc)\.": "head.fc.",
}
_SAMPLING = {
    "roi_offset_bias": "tokenizer.placer.grid",
    "roi_offset_module.0.": "tokenizer.placer.norm.",
    "roi_offset_module.1.weight": "tokenizer.placer.to_offset.weight",
    "adaptive_mixing.parameter_generator.0.": "tokenizer.decoder.norm.",
    "adaptive_mixing.parameter_generator.1.": "tokenizer.decoder.to_hidden.",
    "adaptive_mixing.parameter_generator.2.": "tokenizer.decoder.to_weights.",
    "adaptive_mixing.out_proj.": "tokenizer.decoder.proj.",
    "pe_transition.0.": "position.norm.",
    "pe_transition.1.": "position.proj.",
}
_ADJUSTER = {
    "roi_adjust_module.0.": "adjuster.norm.",
    "roi_adjust_module.1.": "adjuster.fc.",
    "roi_adjust_module.3.weight": "adjuster.to_delta.weight",
}
_ENCODER = {layer: layer for layer in ("norm1.", "norm2.", "attn.qkv.", "attn.proj.", "mlp.fc1.", "mlp.fc2.")}
_FOCUSING, _RESAMPLING = 0, 2  # numbers of their layers; 1 is the bridge, the cortex begins at 3


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the keys of an official SparseFormer v2; some of them are v1's, too."""
    return any(key == "cls_embedding.weight" or ".pe_transition." in key for key in keys)


def convert(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename the authors' keys to ours; the number of blocks may be any."""
    return rename_keys(state_dict, _OUTSIDE, _parts)


def _parts(index: int) -> Parts:
    if index == _FOCUSING:
        block = "focus.blocks.0."
        return [(f"{block}sampling.", _SAMPLING), (f"{block}encoder.", _ENCODER), (block, _ADJUSTER)]
    if index == _RESAMPLING:
        return [("resample.", _SAMPLING)]
    return [(f"cortex.blocks.{index - _RESAMPLING - 1}.", _ENCODER)]
