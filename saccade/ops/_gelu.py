"""GELU and its derivative inside Triton kernels.

The error function takes some 25 instructions, more than the nine taps of a depth-wise convolution. In half precision
the tanh form is used, as x times a sigmoid in 7 instructions: at most 5e-4 from the exact one, where the spacing of the
dtype is 2e-3 and more. Seven if exponential and reciprocal are the hardware's own, which flush numbers below 1e-38.
"""

from typing import no_type_check

import torch

from saccade.ops._launch import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton import knobs

    # Two definitions of one name, not two names and a choice: Inductor copies the source of what a kernel calls.
    if knobs.runtime.interpret or torch.version.hip is not None:

        @triton.jit
        def _exp2(x):  # type: ignore[no-redef]
            return tl.exp2(x)

        @triton.jit
        def _reciprocal(x):  # type: ignore[no-redef]
            return 1 / x

    else:  # NVIDIA

        @triton.jit
        def _exp2(x):
            return tl.inline_asm_elementwise(
                "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )

        @triton.jit
        def _reciprocal(x):
            return tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )

    @triton.jit
    @no_type_check
    def _gelu_gate(x):
        """The sigmoid whose product with x is the tanh form of GELU."""
        return _reciprocal(1 + _exp2(x * (-2.3022081985 - 0.1029432397 * x * x)))

    @triton.jit
    def gelu(x, EXACT: tl.constexpr):
        if EXACT:
            y = 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
        else:
            y = x * _gelu_gate(x)
        return y

    @triton.jit
    @no_type_check
    def gelu_derivative(x, EXACT: tl.constexpr):
        if EXACT:
            density = tl.math.exp(-0.5 * x * x) * 0.3989422804014327
            derivative = 0.5 * (1 + tl.math.erf(x * 0.7071067811865476)) + x * density
        else:
            gate = _gelu_gate(x)
            derivative = gate + x * gate * (1 - gate) * (1.5957691216 + 0.2140644488 * x * x)
        return derivative
