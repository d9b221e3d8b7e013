"""MXFP4 in GGUF: blocks of 17 bytes, the scale byte first, then element j beside element j + 16.

Byte 1 + j of a block holds element j in the low nibble and element j + 16 in the high one.
Example: codes 0..15 twice under scale byte 127 lie as
`7f 00 11 22 33 44 55 66 77 88 99 aa bb cc dd ee ff`. No value changes, only the order.
"""

import torch
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats.blocks import check_packed, join_runs, split_runs
from k3quant.formats.e2m1 import pack_nibbles, unpack_nibbles
from k3quant.formats.mx import GGUF_BLOCK_BYTES, MX_BLOCK_SIZE


def pack_gguf_mxfp4(packed: Tensor, scale_e8m0: Tensor) -> Tensor:
    """Interleave codes and scales into GGUF blocks.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e8m0: `[..., cols / 32]` uint8.

    Returns:
        `[..., cols / 32 * 17]` uint8.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.

    Source: ggml-org/llama.cpp, `ggml/src/ggml-common.h`, `block_mxfp4`, and
        `ggml/src/ggml-quants.c`, `dequantize_row_mxfp4`.
    """
    check_packed(packed, scale_e8m0, MX_BLOCK_SIZE)
    codes = split_runs(unpack_nibbles(packed), MX_BLOCK_SIZE)
    first, second = codes.chunk(2, dim=-1)
    return join_runs(torch.cat((scale_e8m0[..., None], first | (second << 4)), dim=-1))


def unpack_gguf_mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Take codes and scales out of GGUF blocks.

    Args:
        blocks: `[..., cols / 32 * 17]` uint8.

    Returns:
        `[..., cols / 2]` uint8, low nibble first, and `[..., cols / 32]` uint8 scale bytes.

    Raises:
        SchemaError: The bytes are no whole blocks.
    """
    if blocks.shape[-1] % GGUF_BLOCK_BYTES:
        raise SchemaError(
            f"row bytes: expected a multiple of {GGUF_BLOCK_BYTES}, got {blocks.shape[-1]}"
        )
    runs = split_runs(blocks, GGUF_BLOCK_BYTES)
    nibbles = runs[..., 1:]
    codes = torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1)
    return pack_nibbles(join_runs(codes)), runs[..., 0].contiguous()
