"""Under torch.compile, Triton kernels are nodes of the graph that Inductor launches, not opaque operators."""

import json
import os
import subprocess
import sys

import pytest

from tests.ops.compare import needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
OPAQUE = {
    "saccade.linear_fixed_layout",  # keeps Inductor from padding rows, see ops.linear
    "saccade.cast_together",  # a few launches of ATen for all weights, see ops._weights
}


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "sparseformer_nano", "vt_nano"])
def test_compiled_graph_has_kernels_and_no_opaque_operators(name, mode, shapes):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.trace_models", name, mode, shapes]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    targets = json.loads(result.stdout.splitlines()[-1])
    assert any("triton_kernel_wrapper" in target for target in targets)
    assert {target.removesuffix(".default") for target in targets if target.startswith("saccade.")} <= OPAQUE
