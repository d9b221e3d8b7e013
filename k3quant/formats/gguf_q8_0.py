"""Q8_0 in GGUF: blocks of 34 bytes, a float16 scale, then 32 integers -127..127.

Example: 127.0 beside 31 zeros lies as `00 3c 7f` and 31 times `00`: scale 1.0, code 127.
"""

import torch
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats.faults import not_finite, overflow

Q8_0_BLOCK_SIZE = 32
Q8_0_BLOCK_BYTES = 2 + Q8_0_BLOCK_SIZE
Q8_0_MAX = 127


def quantize_q8_0(weight: Tensor) -> Tensor:
    """Round values to integers under amax / 127 of their block, ties away from zero.

    The codes follow from the float32 scale, which is stored rounded to float16: so they do in
    ggml's own quantizer, whose bytes these are.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16.

    Returns:
        `[..., cols / 32 * 34]` uint8. A zero block has scale 0, and so has one whose scale
        float16 rounds to zero: its values are lost. An empty tensor stays empty.

    Raises:
        SchemaError: The columns are no whole blocks.
        ValuesError: A value is NaN or infinite, or a scale is beyond float16.

    Source: ggml-org/llama.cpp, `ggml/src/ggml-quants.c`, `quantize_row_q8_0_ref`.
    """
    *lead, cols = weight.shape
    if cols % Q8_0_BLOCK_SIZE:
        raise SchemaError(f"columns: expected whole blocks of {Q8_0_BLOCK_SIZE}, got {cols}")
    row_bytes = cols // Q8_0_BLOCK_SIZE * Q8_0_BLOCK_BYTES
    if not weight.numel():
        return torch.empty((*lead, row_bytes), dtype=torch.uint8)
    blocks = weight.float().reshape(-1, Q8_0_BLOCK_SIZE)
    bad = blocks.numel() - int(torch.isfinite(blocks).sum())
    if bad:
        raise not_finite("q8_0", bad)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / Q8_0_MAX
    stored = scale.half()
    if not bool(torch.isfinite(stored).all()):
        raise overflow("q8_0", "a float16 scale", f"a scale of {float(scale.max())}")
    scaled = blocks * torch.where(scale == 0, 0.0, 1.0 / scale)
    # Adding 0.5 and cutting is wrong for the float below 0.5: the sum rounds up to 1.
    whole = scaled.trunc()
    away = whole + torch.where((scaled - whole).abs() >= 0.5, scaled.sign(), 0.0)
    packed = torch.cat((stored.view(torch.uint8), away.to(torch.int8).view(torch.uint8)), dim=-1)
    return packed.reshape(*lead, row_bytes)


def dequantize_q8_0(blocks: Tensor) -> Tensor:
    """Compute integer * scale in float32.

    Args:
        blocks: `[..., cols / 32 * 34]` uint8.

    Returns:
        `[..., cols]` float32.

    Raises:
        SchemaError: The bytes are no whole blocks.
    """
    *lead, row_bytes = blocks.shape
    if row_bytes % Q8_0_BLOCK_BYTES:
        raise SchemaError(
            f"row bytes: expected whole blocks of {Q8_0_BLOCK_BYTES}, got {row_bytes}"
        )
    cols = row_bytes // Q8_0_BLOCK_BYTES * Q8_0_BLOCK_SIZE
    if not blocks.numel():
        return torch.empty((*lead, cols), dtype=torch.float32)
    runs = blocks.reshape(-1, Q8_0_BLOCK_BYTES)
    scale = runs[:, :2].contiguous().view(torch.float16).float()
    values = scale * runs[:, 2:].contiguous().view(torch.int8).float()
    return values.reshape(*lead, cols)
