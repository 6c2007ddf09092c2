"""GELU and its slope, for the kernels that have one inside.

The error function takes some 25 instructions, more than all nine taps of a depth-wise convolution. In half precision
the tanh form does, as x times a sigmoid in 7 of them: at most 5e-4 from the exact one, where the type's own steps are
2e-3 and more. Seven if exponential and division are the chip's own, which take numbers below 1e-38 for zeros; the ways
around that would be nine more.
"""

import torch

from saccade.kernels.launch import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton import knobs

    # Two definitions of one name, not two names and a choice: compilers copy the source of what a kernel calls.
    if knobs.runtime.interpret or torch.version.hip is not None:

        @triton.jit
        def _power_of_2(x):  # type: ignore
            return tl.exp2(x)

        @triton.jit
        def _inverse(x):  # type: ignore
            return 1 / x

    else:  # NVIDIA's own

        @triton.jit
        def _power_of_2(x):
            return tl.inline_asm_elementwise(
                "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )

        @triton.jit
        def _inverse(x):
            return tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )

    @triton.jit
    def _open(x):
        """How far the gate is open: the sigmoid whose product with x is the tanh form."""
        return _inverse(1 + _power_of_2(x * (-2.3022081985 - 0.1029432397 * x * x)))

    @triton.jit
    def gelu(x, EXACT: tl.constexpr):
        if EXACT:
            y = 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
        else:
            y = x * _open(x)
        return y

    @triton.jit
    def gelu_slope(x, EXACT: tl.constexpr):
        if EXACT:
            density = tl.math.exp(-0.5 * x * x) * 0.3989422804014327
            slope = 0.5 * (1 + tl.math.erf(x * 0.7071067811865476)) + x * density
        else:
            gate = _open(x)
            slope = gate + x * gate * (1 - gate) * (1.5957691216 + 0.2140644488 * x * x)
        return slope
