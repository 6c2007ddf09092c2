"""Compare cross-attention in stage 1 of `paca_small` at 512 px with the call in the authors' code.

    python benchmarks/paca_attention.py --size 512 --threads 1

Interleaved in one process; compare the ratios. `group` is the clustering and pooling, which both designs have.
`weights returned` is F.multi_head_attention_forward(need_weights=True) on the same tensors.
"""

import argparse
import json
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import saccade
from saccade.benchmark import interleave
from saccade.layers.attention import CrossAttention
from saccade.layers.grid import to_pixels


def multi_head(attention: CrossAttention, pixels: Tensor, tokens: Tensor) -> Tensor:
    """Return the output of PyTorch's multi-head attention with need_weights=True, on the weights of our layer."""
    weight = torch.cat([attention.to_query.weight, attention.to_key_value.weight])
    bias = torch.cat([attention.to_query.bias, attention.to_key_value.bias])
    query, key = pixels.transpose(0, 1), tokens.transpose(0, 1)
    mixed, _ = F.multi_head_attention_forward(
        query, key, key, query.shape[2], attention.num_heads, weight, bias, None, None, False, 0.0,
        attention.proj.weight, attention.proj.bias, training=False, need_weights=True,
    )  # fmt: skip
    return mixed.transpose(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    block: Any = saccade.create_model("paca_small").get_submodule("stages.0.blocks.0").to(args.device).eval()
    side = args.size // 4
    features = torch.randn(args.batch, 96, side, side, device=args.device).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        pixels, tokens = to_pixels(features), block.tokenizer(features)[0]
        torch.testing.assert_close(
            block.attn(pixels, tokens), multi_head(block.attn, pixels, tokens), rtol=1e-3, atol=1e-4
        )
    calls = {
        "saccade": lambda: block.attn(pixels, tokens),
        "weights returned": lambda: multi_head(block.attn, pixels, tokens),
        "group": lambda: block.tokenizer(features),
        "group and saccade": lambda: block.attn(pixels, block.tokenizer(features)[0]),
        "group and weights returned": lambda: multi_head(block.attn, pixels, block.tokenizer(features)[0]),
    }
    with torch.no_grad():
        rounds = list(interleave(list(calls.values()), [args.device] * len(calls), args.rounds))
    seconds = {name: median(times) for name, times in zip(calls, zip(*rounds, strict=True), strict=True)}
    print(
        json.dumps(
            {
                "size": args.size,
                "pixels": side * side,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "milliseconds": {name: round(1e3 * value, 2) for name, value in seconds.items()},
                "attention, times faster": round(seconds["weights returned"] / seconds["saccade"], 2),
                "with grouping, times faster": round(
                    seconds["group and weights returned"] / seconds["group and saccade"], 2
                ),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
