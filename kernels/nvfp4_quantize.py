"""Floats to NVFP4 under a given tensor scale; reference: formats.nvfp4.quantize_nvfp4."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.errors import SchemaError
from k3quant.formats.e2m1 import E2M1_MAX
from k3quant.formats.nvfp4 import NVFP4_GROUP_SIZE, GlobalConvention, GlobalScale
from k3quant.kernels.nvfp4_dequantize import group_scale
from k3quant.kernels.rounding import encode_e4m3_byte, nearest_code, to_float32

_GROUPS = 128
_WARPS = 4


def quantize_nvfp4(weight: Tensor, global_scale: GlobalScale) -> tuple[Tensor, Tensor, Tensor]:
    """Round values to NVFP4 under a given tensor scale.

    Args:
        weight: `[..., cols]` float32, bfloat16 or float16, columns a multiple of 16.
        global_scale: The tensor's scale.

    Returns:
        `[..., cols / 2]` uint8, the even column in the low nibble; `[..., cols / 16]` uint8 E4M3
        group scales; and an int32 scalar that is 1 when a value is NaN or infinite, and the rest
        is then undefined.

    Raises:
        SchemaError: The columns are no multiple of 16.
    """
    *lead, cols = weight.shape
    if cols % NVFP4_GROUP_SIZE:
        raise SchemaError(f"columns: expected a multiple of {NVFP4_GROUP_SIZE}, got {cols}")
    weight = weight.contiguous()
    packed = torch.empty((*lead, cols // 2), dtype=torch.uint8, device=weight.device)
    grid_shape = (*lead, cols // NVFP4_GROUP_SIZE)
    scale_e4m3 = torch.empty(grid_shape, dtype=torch.uint8, device=weight.device)
    fault = torch.zeros((), dtype=torch.int32, device=weight.device)
    divides = global_scale.convention is GlobalConvention.DIVISOR
    # The product with 6 is rounded to float32 once, as the reference rounds it.
    six = float(torch.tensor(global_scale.value, dtype=torch.float32) * E2M1_MAX)
    if scale_e4m3.numel():
        _quantize_nvfp4_kernel[(triton.cdiv(scale_e4m3.numel(), _GROUPS),)](
            weight,
            packed,
            scale_e4m3,
            fault,
            scale_e4m3.numel(),
            global_scale.value,
            six,
            DIVIDES=divides,
            GROUPS=_GROUPS,
            num_warps=_WARPS,
        )
    return packed, scale_e4m3, fault


@triton.jit
def _quantize_nvfp4_kernel(
    weight_ptr,
    packed_ptr,
    scale_ptr,
    fault_ptr,
    groups,
    global_scale,
    global_six,
    DIVIDES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    live = group < groups - start
    offsets = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    weight = to_float32(tl.load(weight_ptr + start * 16 + offsets, mask=live[:, None], other=0))
    bits = weight.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, axis=1)
    amax = largest.to(tl.float32, bitcast=True)
    zeros = tl.zeros((GROUPS,), tl.float32)
    if DIVIDES:
        local = tl.div_rn(amax, zeros + 6.0) * global_scale
    else:
        local = tl.div_rn(amax, zeros + global_six)
    scale = tl.maximum(encode_e4m3_byte(local), 1)
    scale = tl.where(largest == 0, 0x38, scale)
    step = group_scale(scale, global_scale, DIVIDES)[:, None]
    ratio = tl.div_rn(tl.abs(weight), step + tl.zeros((GROUPS, 16), tl.float32))
    codes = nearest_code(tl.minimum(ratio, 6.0), MANTISSA_BITS=1, MIN_EXPONENT=0)
    low, high = tl.split(tl.reshape(codes | ((bits >> 28) & 8), (GROUPS, 8, 2)))
    offsets = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(packed_ptr + start * 8 + offsets, packed, mask=live[:, None])
    tl.store(scale_ptr + start + group, scale.to(tl.uint8), mask=live)
    flag = fault_ptr + tl.zeros((GROUPS,), tl.int32)
    tl.store(flag, 1, mask=live & (largest >= 0x7F800000))
