"""Turn E2M1 codes into bytes by a table of eight; reference: indexing a table of 16 in torch.

The device picks four bytes of a table in one instruction, by the low three bits of four nibbles.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from k3quant.kernels.rounding import INTERPRETED

# A nibble's sign is the highest bit of its byte, or of the word four bits up; the exchange of
# bytes brings the two words together.
_LOOK_UP = tl.constexpr("""
{
.reg .b32 index, up, sign, code;
and.b32  index, $2, 0x77777777;
shl.b32  up, $2, 4;
prmt.b32 sign, up, $2, 0x5140;
and.b32  sign, sign, 0x80808080;
prmt.b32 code, $3, $4, index;
or.b32   $0, code, sign;
shr.b32  index, index, 16;
prmt.b32 sign, up, $2, 0x7362;
and.b32  sign, sign, 0x80808080;
prmt.b32 code, $3, $4, index;
or.b32   $1, code, sign;
}
""")


@triton.jit
def look_up(words, low, high):
    """Replace each magnitude by its byte and put the sign into the byte's highest bit.

    Args:
        words: Any shape, uint32 of eight nibbles, the first lowest.
        low: Bytes of codes 0..3, the first lowest; uint32 of a shape that broadcasts.
        high: Bytes of codes 4..7.

    Returns:
        The bytes of nibbles 0..3 and of nibbles 4..7, uint32.
    """
    if INTERPRETED:
        result = _four_bytes(words, low, high), _four_bytes(words >> 16, low, high)
    else:
        result = tl.inline_asm_elementwise(
            _LOOK_UP,
            "=&r,=&r,r,r,r",
            [words, low, high],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def _four_bytes(words, low, high):
    result = words & 0
    for i in tl.static_range(4):
        nibble = (words >> (4 * i)) & 0xF
        table = tl.where((nibble & 4) > 0, high, low)
        byte = (table >> ((nibble & 3) * 8)) & 0xFF
        result |= (byte | ((nibble & 8) << 4)) << (8 * i)
    return result
