"""What only GGUF asks for: interleaved MXFP4 blocks, folded norms, a folded exponential."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.buffers import scratch
from k3quant.convert.export_plan import Write
from k3quant.convert.proof import WeightProof
from k3quant.errors import ValuesError
from k3quant.formats.error import ErrorSum
from k3quant.formats.fast_gguf import pack_to_gguf
from k3quant.formats.faults import nan_scale
from k3quant.formats.mx import E8M0_NAN, GGUF_BLOCK_BYTES
from k3quant.schemes.float_units import Bytes, check_padding, read_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksUnit:
    """One MXFP4 matrix of one expert, at its place among the stacked ones.

    Attributes:
        module: The matrix.
        family: Family of the table.
        packed: Name of its codes.
        scale: Name of its scale bytes.
        target: The stacked output tensor.
        offset: First byte in it.
    """

    module: str
    family: str
    packed: str
    scale: str
    target: str
    offset: int

    @property
    def sources(self) -> Sequence[str]:
        """Codes and scale bytes."""
        return (self.packed, self.scale)

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Interleave codes and scale bytes; no bit of either changes.

        Raises:
            ValuesError: A scale byte is NaN, which GGUF's readers take for a number.
        """
        codes = self._read(checkpoint, self.packed)
        scales = self._read(checkpoint, self.scale)
        bad = int(np.count_nonzero(scales == E8M0_NAN))
        if bad:
            raise nan_scale(self.module, bad)
        rows, blocks = scales.shape
        out = scratch().array("blocks", (rows, blocks * GGUF_BLOCK_BYTES), np.uint8)
        write(self.target, self.offset, pack_to_gguf(codes, scales, out=out))  # type: ignore[arg-type]
        return (
            WeightProof(
                module=self.module,
                family=self.family,
                source="mxfp4",
                target="mxfp4-gguf",
                exact=True,
            ),
        )

    def _read(self, checkpoint: Checkpoint, name: str) -> Bytes:
        array: Bytes = scratch().array(
            name.rpartition(".")[2], checkpoint.entry(name).shape, np.uint8
        )  # type: ignore[assignment]
        checkpoint.read_into(name, array)
        return array


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualScoreUnit:
    """The norm of a residual mix times its projection: a reader needs only their product.

    Attributes:
        norm: Name of the norm.
        proj: Name of the projection, `[1, hidden]`.
        modules: What the proof calls both.
        family: Family of the table.
        target: Output tensor `[hidden]` F32.
    """

    norm: str
    proj: str
    modules: tuple[str, str]
    family: str
    target: str

    @property
    def sources(self) -> Sequence[str]:
        """Norm and projection."""
        return (self.norm, self.proj)

    def run(self, checkpoint: Checkpoint, write: Write) -> Sequence[WeightProof]:
        """Multiply in float64 and round once; from bfloat16 the product is exact in float32."""
        factors = [read_floats(checkpoint, name) for name in self.sources]
        norm, proj = (factor.reshape(-1) for factor in factors)
        product = norm.double() * proj.double()
        sums = ErrorSum()
        write(self.target, 0, _rounded(product, sums))
        dtypes = [checkpoint.entry(name).dtype for name in self.sources]
        return tuple(
            WeightProof(
                module=module,
                family=self.family,
                source=dtype,
                target="F32 norm x proj",
                exact=sums.result().exact,
                error=sums.result(),
            )
            for module, dtype in zip(self.modules, dtypes, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayUnit:
    """`-exp(A_log)` of the heads; what pads A_log to the head width is left out.

    Attributes:
        source: Name of A_log.
        family: Family of the table.
        target: Output tensor `[heads]` F32.
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
        """Compute in float64 and round once.

        Raises:
            ValuesError: The padding is not zero, or a value is no finite number.
        """
        values = read_floats(checkpoint, self.source).reshape(-1)
        check_padding(self.source, values[self.heads :])
        decay = -torch.exp(values[: self.heads].double())
        if not bool(torch.isfinite(decay.float()).all()):
            raise ValuesError(
                f"{self.source}: expected logarithms of finite numbers, got "
                f"{values[: self.heads].tolist()}"
            )
        sums = ErrorSum()
        write(self.target, 0, _rounded(decay, sums))
        return (
            WeightProof(
                module=self.source,
                family=self.family,
                source=checkpoint.entry(self.source).dtype,
                target="F32 -exp",
                exact=sums.result().exact,
                error=sums.result(),
            ),
        )


def _rounded(exact: torch.Tensor, sums: ErrorSum) -> Bytes:
    result = exact.float()
    sums.add(exact, result)
    array: Bytes = result.view(torch.uint8).numpy()
    return array
