"""Parts of Triton kernels that read a KV cache of 8 bits (cache.py).

A GPU converts e4m3 to bf16 by way of float16 and float32, one number at a time, which is more work than
attention itself. Here instructions for two numbers at a time put their bits where bf16 has its own. Its
exponent is wider, so that gives the numbers times 2^-120, exactly, also those that are subnormal in either
format; a product with 2^120 gives the numbers. This file needs Triton and is imported only on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _moved_bits(first: int, second: int) -> tl.constexpr:
    """Of four e4m3 in $2, the pairs that `first` and `second` select, as pairs of bf16 in $0 and $1.

    prmt puts each byte below eight copies of its sign. Moved by four bits, its exponent and its digits are
    where bf16 has them, below the sign and four copies of it, which the mask removes. 0x7b80 is 2^120.
    """
    return tl.constexpr(f"""{{
        .reg .b32 a, b, power;
        prmt.b32 a, $2, 0, {first:#x};
        prmt.b32 b, $2, 0, {second:#x};
        shl.b32 a, a, 4;
        shl.b32 b, b, 4;
        and.b32 a, a, 0x87f087f0;
        and.b32 b, b, 0x87f087f0;
        mov.b32 power, 0x7b807b80;
        mul.rn.bf16x2 $0, a, power;
        mul.rn.bf16x2 $1, b, power;
    }}""")


_IN_ORDER = _moved_bits(0x9180, 0xB3A2)
_EVEN_AND_ODD = _moved_bits(0xA280, 0xB391)


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """e4m3 numbers, none of them NaN, in another dtype."""
    if dtype == tl.bfloat16:
        bits = codes.to(tl.uint8, bitcast=True)
        return tl.inline_asm_elementwise(_IN_ORDER, "=r,=r,r", [bits], tl.bfloat16, is_pure=True, pack=4)
    else:
        return codes.to(dtype)


@triton.jit
def widened_pairs(pairs, dtype: tl.constexpr):
    """The first and the second numbers of pairs of e4m3, as `widened` gives them. `pairs` are int16: a GPU
    has an instruction that transposes 16 bits, and none for 8."""
    if dtype == tl.bfloat16:
        both: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(_EVEN_AND_ODD, "=r,=r,r", [pairs], both, is_pure=True, pack=2)
    else:
        even = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return even.to(dtype), odd.to(dtype)
