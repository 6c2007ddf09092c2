"""Trace models as torch.compile does on a GPU, without one: print the targets of their graphs as JSON.

Run as a program, without TRITON_INTERPRET: kernels are then traced as `triton_kernel_wrapper` nodes, and not run.
"""

import json
import logging
import sys

import torch
import torch.nn.functional as F
import triton
from torch._dynamo.backends.common import aot_autograd
from triton.backends.compiler import GPUTarget

import saccade
from saccade import ops

logging.disable(logging.WARNING)


class Driver:
    """As much of a Triton driver as torch.compile needs to find out which arguments a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        raise RuntimeError("0 active drivers")


triton.runtime.driver.set_active(Driver())


def graph_targets(name: str, training: bool, dynamic: bool) -> list[str]:
    """Targets of all nodes in the forward and backward graphs of a model."""
    targets: list[str] = []

    def collect(graph: torch.fx.GraphModule, inputs: object) -> object:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    model = saccade.create_model(name, num_classes=3).to(memory_format=torch.channels_last).train(training)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=collect))
    images = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    with ops.interpreted(), torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16):
        try:
            F.cross_entropy(compiled(images).float(), torch.zeros(2, dtype=torch.long))
        except RuntimeError as error:  # the graphs are complete; launching needs a GPU
            if "active drivers" not in str(error):
                raise
    torch._dynamo.reset()
    return targets


if __name__ == "__main__":
    name, training, dynamic = sys.argv[1], sys.argv[2] == "training", sys.argv[3] == "dynamic"
    print(json.dumps(graph_targets(name, training, dynamic)))
