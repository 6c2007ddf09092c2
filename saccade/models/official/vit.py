"""timm's plain ViTs: what a SparseFormer v2 inherits, under its names and without layer scale."""

import torch
from torch import Tensor

LAYERS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")  # of a block
LAYER_SCALES = {"ls1.gamma": "attn.proj", "ls2.gamma": "mlp.fc2"}  # and the layers that they scale
KEYS = {f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")} | set(LAYER_SCALES)


def convert(state_dict: dict[str, Tensor], first: int, count: int) -> dict[str, Tensor]:
    """The weights of the blocks from `first` to `count`, of the last norm and of the last linear layer."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}

    parts = {f"cortex.blocks.{i - first}": convert_block(part(f"blocks.{i}.")) for i in range(first, count)}
    parts["head.norm"] = part("norm.") or part("fc_norm.")
    parts["head.fc"] = {kind: value for kind, value in part("head.").items() if kind in ("weight", "bias")}
    return {f"{name}.{key}": value for name, weights in parts.items() for key, value in weights.items()}


def convert_block(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a block: layer scale is multiplied into its layers, missing biases are zero."""
    theirs = {key: value for key, value in state_dict.items() if key not in LAYER_SCALES}
    for scale, layer in LAYER_SCALES.items():
        if scale in state_dict:
            theirs[f"{layer}.weight"] = state_dict[scale].unsqueeze(1) * theirs[f"{layer}.weight"]
            if f"{layer}.bias" in theirs:
                theirs[f"{layer}.bias"] = state_dict[scale] * theirs[f"{layer}.bias"]
    zeros = {f"{layer}.bias": torch.zeros(len(theirs[f"{layer}.weight"])) for layer in LAYERS}
    return zeros | theirs
