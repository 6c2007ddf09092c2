"""Compare compiled with eager training and find the first non-finite value (needs a GPU).

    python benchmarks/check_compiled_training.py svit_nano --steps 300                  # every set of operations
    python benchmarks/check_compiled_training.py svit_nano --ops depthwise super_tokens --steps 300

For every set of operations that may run fused under torch.compile: N training steps under bfloat16 autocast on
synthetic images with separable classes, then the loss or the first non-finite parameter. Then the gradients of one
step from the same weights: relative error of compiled operations and of eager references against float32, largest
ratio first. An operation that is wrong under torch.compile differs by orders of magnitude.
"""

import argparse
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from timm.models import create_model

import saccade  # noqa: F401  (registers the models)
from saccade import ops
from saccade.inference.compile import compile_options

SETS = {
    "none": (),
    "all": tuple(ops.REGISTRY),
    "norms": ("layer_norm", "add", "add_norm", "norm_act"),
    "depthwise": ("depthwise_conv", "depthwise_gelu", "conv_mlp"),
    "super_tokens": ("super_token_group", "super_token_spread"),
    "attention": ("self_attention", "cross_attention", "pixel_pooling_attention", "token_attention"),
    "stem": ("conv", "max_pool", "conv_pool_relu", "conv_norm_relu_pool"),
    "sampling": ("place_points", "sample", "sample_and_mix"),
}


def only(names: Iterable[str]) -> AbstractContextManager[None]:
    """Run all other operations by their references."""
    return ops.disabled(*(set(ops.REGISTRY) - set(names)))


def synthetic_batch(batch: int, size: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise plus a plane wave whose direction depends on the class, and the classes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    labels = torch.randint(classes, (batch,), generator=generator, device="cuda")
    line = torch.linspace(0, 6.28, size, device="cuda")
    angle = labels.float() / classes * 3.14
    wave = torch.sin(
        4 * (line[None, None] * angle.cos()[:, None, None] + line[None, :, None] * angle.sin()[:, None, None])
    )
    images = torch.randn(batch, 3, size, size, generator=generator, device="cuda") + wave[:, None]
    return images.contiguous(memory_format=torch.channels_last), labels


def new_model(args: argparse.Namespace):
    torch.manual_seed(0)
    return create_model(args.model, num_classes=10).cuda().to(memory_format=torch.channels_last).train()


def first_non_finite(model) -> str | None:
    """Return the first parameter whose value or gradient is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"gradient of {name}"
        if not parameter.isfinite().all():
            return name
    return None


def train(args: argparse.Namespace, compiled: bool) -> str:
    model = new_model(args)
    forward = torch.compile(model, fullgraph=True, **compile_options()) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, fused=True)
    first, loss = None, torch.zeros(())
    for step in range(args.steps):
        images, labels = synthetic_batch(args.batch, args.size, 10, step)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        first = float(loss) if first is None else first
        name = first_non_finite(model)
        if name or not loss.isfinite():
            return f"step {step}: {name or 'loss'} is not finite (loss {float(loss):.3f})"
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return f"{args.steps} steps, loss {first:.3f} -> {float(loss):.3f}"


def gradients(args: argparse.Namespace, compiled: bool, exact: bool) -> dict[str, torch.Tensor]:
    model = new_model(args)
    images, labels = synthetic_batch(args.batch, args.size, 10, 12345)
    forward = torch.compile(model, fullgraph=True, **compile_options()) if compiled else model
    with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
        F.cross_entropy(forward(images), labels).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    with ops.enabled(False):
        exact = gradients(args, compiled=False, exact=True)
        references = gradients(args, compiled=False, exact=False)
    torch._dynamo.reset()
    with only(names):
        compiled = gradients(args, compiled=True, exact=False)

    def error(values: dict[str, torch.Tensor], name: str) -> float:
        return ((values[name] - exact[name]).norm() / exact[name].norm().clamp(min=1e-12)).item()

    worst = sorted(exact, key=lambda name: -error(compiled, name) / max(error(references, name), 1e-4))
    for name in worst[: args.rows]:
        print(f"    {error(compiled, name):9.2e} compiled, {error(references, name):9.2e} eager references: {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="svit_nano")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--ops", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--rows", type=int, default=5)
    args = parser.parse_args()
    print(f"eager, all operations: {train(args, compiled=False)}", flush=True)
    for name in args.ops:
        torch._dynamo.reset()
        with only(SETS[name]):
            print(f"compiled, {name}: {train(args, compiled=True)}", flush=True)
        torch._dynamo.reset()
        compare(args, SETS[name])


if __name__ == "__main__":
    main()
