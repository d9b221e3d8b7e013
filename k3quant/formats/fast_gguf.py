"""MXFP4 to GGUF blocks on the processor, byte for byte as `gguf_mxfp4`, without torch."""

import numpy as np
import numpy.typing as npt

from k3quant.formats.fast_mxfp4 import check_pair
from k3quant.formats.jit import compiled, frozen, over_runs
from k3quant.formats.mx import GGUF_BLOCK_BYTES, MX_BLOCK_SIZE

Bytes = npt.NDArray[np.uint8]

_BLOCK_BYTES = MX_BLOCK_SIZE // 2
_u8 = np.uint8


def pack_to_gguf(
    packed: Bytes, scale_e8m0: Bytes, *, out: Bytes | None = None, threads: int = 1
) -> Bytes:
    """Interleave codes and scales into GGUF blocks.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first, contiguous.
        scale_e8m0: `[..., cols / 32]` uint8, contiguous.
        out: `[..., cols / 32 * 17]` uint8 to fill; None allocates.
        threads: Upper bound of threads to use.

    Returns:
        `[..., cols / 32 * 17]` uint8; `out` where it was given.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
    """
    check_pair(packed, scale_e8m0)
    *lead, blocks = scale_e8m0.shape
    shape = (*lead, blocks * GGUF_BLOCK_BYTES)
    out = np.empty(shape, np.uint8) if out is None else out
    if out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out: expected contiguous uint8 {list(shape)}, got {list(out.shape)}")
    source = frozen(packed, "packed").reshape(-1, _BLOCK_BYTES)
    scales = frozen(scale_e8m0, "scales").reshape(-1)
    target = out.reshape(-1, GGUF_BLOCK_BYTES)
    kernel = compiled(_pack_blocks)
    over_runs(lambda a, b: kernel(source[a:b], scales[a:b], target[a:b]), len(scales), threads)
    return out


def _pack_blocks(packed: Bytes, scale_e8m0: Bytes, out: Bytes) -> None:
    for block in range(scale_e8m0.shape[0]):
        out[block, 0] = scale_e8m0[block]
        for pair in range(8):
            low = packed[block, pair]
            high = packed[block, pair + 8]
            out[block, 1 + 2 * pair] = _u8((low & _u8(0xF)) | _u8(high << _u8(4)))
            out[block, 2 + 2 * pair] = _u8(_u8(low >> _u8(4)) | _u8(high & _u8(0xF0)))
