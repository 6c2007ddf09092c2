"""GELU and its slope, for the kernels that have one inside."""

from saccade.kernels.launch import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def gelu(x):
        return 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))

    @triton.jit
    def gelu_slope(x):
        density = tl.math.exp(-0.5 * x * x) * 0.3989422804014327
        return 0.5 * (1 + tl.math.erf(x * 0.7071067811865476)) + x * density
