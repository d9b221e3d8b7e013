"""The formats a weight can be converted to, and the tensors each one stores.

A format is numbers: how a scheme spells its tensors is the scheme's business. Torch-free.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from k3quant.errors import SchemaError
from k3quant.formats.mx import ScaleRounding


class Format(StrEnum):
    """What `--to` and recipes can name; `KEEP` copies the stored bytes."""

    KEEP = "keep"
    BF16 = "bf16"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    FP8_BLOCK = "fp8-block"
    FP8_CHANNEL = "fp8-channel"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A format with its options.

    Attributes:
        format: The format.
        rounding: Rule for E8M0 scales, where a weight is quantized to MXFP4 or MXFP8.
        group_size: Columns under one INT4 scale, 32 or 128.
        ragged: Whether FP8 tiles may stand over the last rows of a matrix.
    """

    format: Format
    rounding: ScaleRounding = ScaleRounding.EVEN
    group_size: int = 32
    ragged: bool = False

    def __post_init__(self) -> None:
        if self.group_size not in (32, 128):
            raise SchemaError(f"group_size: expected 32 or 128, got {self.group_size}")


class EncodedPart(NamedTuple):
    """One stored tensor of a format: its part, dtype and shape."""

    part: str
    dtype: str
    shape: tuple[int, ...]


# Parts carry compressed-tensors' suffixes; other schemes rename them.
WEIGHT, PACKED, SCALE = "weight", "weight_packed", "weight_scale"
GLOBAL, SHAPE = "weight_global_scale", "weight_shape"
FP8_TILE = 128


def encoded_parts(choice: Choice, rows: int, cols: int) -> Iterator[EncodedPart]:
    """Yield the tensors that a matrix becomes.

    Args:
        choice: The format; not `KEEP`.
        rows: Rows of the weight.
        cols: Columns of the weight.

    Raises:
        SchemaError: The matrix cannot be cut into the format's blocks.
    """
    match choice.format:
        case Format.BF16:
            yield EncodedPart(WEIGHT, "BF16", (rows, cols))
        case Format.MXFP4:
            yield EncodedPart(PACKED, "U8", (rows, cols // 2))
            yield EncodedPart(SCALE, "U8", (rows, _blocks(choice, cols, 32)))
        case Format.MXFP8:
            yield EncodedPart(WEIGHT, "F8_E4M3", (rows, cols))
            yield EncodedPart(SCALE, "U8", (rows, _blocks(choice, cols, 32)))
        case Format.NVFP4:
            yield EncodedPart(PACKED, "U8", (rows, cols // 2))
            yield EncodedPart(SCALE, "F8_E4M3", (rows, _blocks(choice, cols, 16)))
            yield EncodedPart(GLOBAL, "F32", (1,))
        case Format.FP8_BLOCK:
            if rows % FP8_TILE and not choice.ragged:
                raise SchemaError(
                    f"fp8-block: expected rows in whole tiles of {FP8_TILE}, got {rows}",
                    hint="keep this matrix, or say `ragged = true` in its rule",
                )
            yield EncodedPart(WEIGHT, "F8_E4M3", (rows, cols))
            yield EncodedPart(SCALE, "F32", (-(-rows // FP8_TILE), -(-cols // FP8_TILE)))
        case Format.FP8_CHANNEL:
            yield EncodedPart(WEIGHT, "F8_E4M3", (rows, cols))
            yield EncodedPart(SCALE, "F32", (rows, 1))
        case Format.INT8:
            yield EncodedPart(WEIGHT, "I8", (rows, cols))
            yield EncodedPart(SCALE, "F32", (rows, 1))
        case Format.INT4:
            yield EncodedPart(PACKED, "I32", (rows, -(-cols // 8)))
            yield EncodedPart(SCALE, "BF16", (rows, _blocks(choice, cols, choice.group_size)))
            yield EncodedPart(SHAPE, "I64", (2,))
        case Format.KEEP:
            raise ValueError("keep: expected a format that is encoded")


def _blocks(choice: Choice, cols: int, run: int) -> int:
    if cols % run:
        raise SchemaError(
            f"{choice.format}: expected columns in whole runs of {run}, got {cols}",
            hint="keep this matrix",
        )
    return cols // run
