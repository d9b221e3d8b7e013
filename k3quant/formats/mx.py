"""The numbers of the MX formats and their scale rules, without torch.

A block is the run of 32 elements under one scale byte.
"""

from dataclasses import dataclass
from enum import StrEnum

MX_BLOCK_SIZE = 32

E2M1_VALUES = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)
"""The value of every code; code 8 is -0.0.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.
"""

E2M1_MAX = 6.0
E2M1_SIGN = 8

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The magnitude between each pair of neighbours."""

E2M1_TIE_ROUNDS_UP = (False, True, False, True, False, True, False)
"""Whether a tie at that midpoint goes to the upper code, as it does when the upper is even."""

E8M0_BIAS = 127
E8M0_NAN = 255


class ScaleRounding(StrEnum):
    """How the scale of a block follows from `amax`, its largest magnitude.

    With `amax` = m * 2^e, 1 <= m < 2, an element format of maximum M * 2^emax and t mantissa bits:

    Attributes:
        FLOOR: 2^(e - emax); magnitudes beyond the element maximum saturate.
        CEIL: 2^(ceil(log2(amax)) - emax); nothing saturates, up to one bit of range is wasted.
        EVEN: As FLOOR after `amax` is rounded to t mantissa bits, half up (t = 1: m >= 1.75 takes
            the next scale); what compressed-tensors stores for MXFP4.
        RCEIL: 2^ceil(log2(amax / (M * 2^emax))), the smallest scale under which nothing saturates.

    Source:
        FLOOR: OCP Microscaling Formats (MX) Specification v1.0, section 6.3. All four:
        pytorch/ao, `torchao/prototype/mx_formats/config.py`, `ScaleCalculationMode`. EVEN with one
        bit: vllm-project/compressed-tensors, `quantization/utils/mxfp4_utils.py`.
    """

    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RCEIL = "rceil"


@dataclass(frozen=True, slots=True, kw_only=True)
class MxElement:
    """What a scale rule must know of the element format.

    Attributes:
        name: Name for messages.
        max_exponent: Exponent of the largest value.
        max_mantissa: Largest value divided by 2^max_exponent, in 1..2.
        mantissa_bits: Explicit mantissa bits, to which EVEN rounds.
    """

    name: str
    max_exponent: int
    max_mantissa: float
    mantissa_bits: int

    @property
    def max_scale(self) -> int:
        """The largest byte under which every element is finite in float32 and bfloat16."""
        return 2 * E8M0_BIAS - self.max_exponent

    def round_up_step(self, rounding: ScaleRounding, fraction_bits: int) -> int:
        """Return what to add to an `amax` so that it carries exactly when the rule rounds up.

        Args:
            rounding: The rule.
            fraction_bits: Bits of fraction of the integer form of `amax`.

        Returns:
            An integer in units of the last fraction bit, below 2^fraction_bits.
        """
        one = 1 << fraction_bits
        match rounding:
            case ScaleRounding.FLOOR:
                return 0
            case ScaleRounding.CEIL:
                return one - 1
            case ScaleRounding.EVEN:
                return one >> (self.mantissa_bits + 1)
            case ScaleRounding.RCEIL:
                return one - 1 - int((self.max_mantissa - 1.0) * one)


E2M1_ELEMENT = MxElement(name="e2m1", max_exponent=2, max_mantissa=1.5, mantissa_bits=1)
E4M3_ELEMENT = MxElement(name="e4m3", max_exponent=8, max_mantissa=1.75, mantissa_bits=3)

GGUF_BLOCK_BYTES = 1 + MX_BLOCK_SIZE // 2
"""Bytes of one MXFP4 block in GGUF."""
