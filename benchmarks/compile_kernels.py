"""Compile every Triton kernel a model needs, without a GPU: number of variants and seconds per variant.

    python benchmarks/compile_kernels.py svit_small --mode training            # for sm_90, on one CPU core
    python benchmarks/compile_kernels.py svit_small paca_small --arch 80

The model runs on CPU tensors with launches collected instead of executed (`saccade.ops._launch`), once per image size;
what Triton would compile for the launches is then compiled for the architecture. The sum is what a first call with a
cold kernel cache waits for, on this CPU.
"""

import argparse
import json
import time
from collections.abc import Iterable

import timm
import torch
import torch.nn.functional as F

import saccade  # noqa: F401  (registers the models)
from saccade import ops
from saccade.ops._launch import KERNELS, Specialization, record_specializations

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.int64: "i64"}
OPTIONS = ("num_warps", "num_stages")


def specializations(
    model: str, mode: str = "inference", sizes: Iterable[int] = (224,), batch: int = 2
) -> set[Specialization]:
    """What Triton compiles when the model runs at these image sizes, under bfloat16 autocast, channels-last."""
    network = timm.create_model(model).to(memory_format=torch.channels_last).train(mode == "training")
    with ops.interpreted(), record_specializations(execute=False) as compiled:
        for size in sizes:
            images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(mode == "training"):
                logits = network(images)
            if mode == "training":
                F.cross_entropy(logits.float(), torch.zeros(batch, dtype=torch.long)).backward()
    return compiled


def compile_variant(variant: Specialization, arch: int = 90) -> float:
    """Seconds that Triton takes to compile this variant for an NVIDIA architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, constants = KERNELS[variant.kernel], dict(variant.constants)
    names = list(function.arg_names)
    pointers = [name for name in names if name.endswith("_ptr")]
    signature = dict.fromkeys(names, "i32") | dict.fromkeys((name for name in names if name in constants), "constexpr")
    signature |= {name: "*" + TYPES[dtype] for name, dtype in zip(pointers, variant.dtypes, strict=True)}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs=aligned,
    )
    start = time.perf_counter()
    options = {name: value for name, value in constants.items() if name in OPTIONS}
    triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--mode", choices=("inference", "training"), default="inference")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = {}
    for model in args.models:
        variants = sorted(specializations(model, args.mode), key=str)
        seconds = [(compile_variant(variant, args.arch), variant) for variant in variants]
        report[model] = {"variants": len(variants), "seconds": sum(value for value, _ in seconds)}
        if not args.json:
            for value, variant in sorted(seconds, key=lambda pair: -pair[0]):
                print(f"{value:6.2f} s  {variant.kernel} {dict(variant.constants)}")
            print(f"{model}, {args.mode}: {len(variants)} variants, {report[model]['seconds']:.1f} s")
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
