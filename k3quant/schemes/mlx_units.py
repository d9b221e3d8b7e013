"""What only MLX asks for: stacked MXFP4 bytes, and A_log without its padding."""

from collections.abc import Sequence
from dataclasses import dataclass

from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.buffers import copy_bytes
from k3quant.convert.export_plan import Write
from k3quant.convert.proof import WeightProof
from k3quant.formats.dtypes import DTYPES
from k3quant.schemes.float_units import check_padding, read_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StackUnit:
    """Codes or scale bytes of one expert's matrix, at their place among the stacked ones.

    Attributes:
        source: Name of the codes or the scale bytes.
        module: The matrix; None for scale bytes, whose record is the codes'.
        family: Family of the table.
        target: The stacked output tensor.
        offset: First byte in it.
    """

    source: str
    module: str | None
    family: str
    target: str
    offset: int

    @property
    def sources(self) -> Sequence[str]:
        """The tensor."""
        return (self.source,)

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Copy the bytes."""
        copy_bytes(checkpoint, self.source, write, target=self.target, offset=self.offset)
        if self.module is None:
            return ()
        return (
            WeightProof(
                module=self.module, family=self.family, source="mxfp4", target="mxfp4", exact=True
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CutUnit:
    """A_log of the heads; what pads it to the head width is left out.

    Attributes:
        source: Name of A_log.
        family: Family of the table.
        target: Output tensor `[heads]`.
        heads: Heads.
    """

    source: str
    family: str
    target: str
    heads: int

    @property
    def sources(self) -> Sequence[str]:
        """A_log."""
        return (self.source,)

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Copy the first values.

        Raises:
            ValuesError: The padding is not zero.
        """
        check_padding(self.source, read_floats(checkpoint, self.source).reshape(-1)[self.heads :])
        dtype = checkpoint.entry(self.source).dtype
        length = DTYPES[dtype].byte_count(self.heads)
        copy_bytes(checkpoint, self.source, write, target=self.target, length=length)
        return (
            WeightProof(
                module=self.source, family=self.family, source=dtype, target=dtype, exact=True
            ),
        )
