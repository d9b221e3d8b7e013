"""NVFP4 to floats: code * group scale * tensor scale; reference: formats.nvfp4.dequantize_nvfp4."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.formats.blocks import check_packed
from k3quant.formats.nvfp4 import NVFP4_GROUP_SIZE, GlobalConvention, GlobalScale
from k3quant.kernels.rounding import decode_e2m1_byte, decode_e4m3_byte, to_dtype

TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

_GROUPS = 256
_WARPS = 4


def dequantize_nvfp4(
    packed: Tensor,
    scale_e4m3: Tensor,
    global_scale: GlobalScale,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Compute code * group scale * tensor scale in float32.

    Args:
        packed: `[..., cols / 2]` uint8, low nibble first.
        scale_e4m3: `[..., cols / 16]` uint8 E4M3 group scales.
        global_scale: The tensor's scale and its convention.
        dtype: float32, bfloat16 or float16.

    Returns:
        `[..., cols]` in `dtype`, and an int32 scalar that is 1 when a group scale is NaN or
        negative or a value overflows.

    Raises:
        SchemaError: The scale grid does not fit the packed columns.
    """
    check_packed(packed, scale_e4m3, NVFP4_GROUP_SIZE)
    packed, scale_e4m3 = packed.contiguous(), scale_e4m3.contiguous()
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    fault = torch.zeros((), dtype=torch.int32, device=packed.device)
    groups = scale_e4m3.numel()
    if groups:
        _dequantize_nvfp4_kernel[(triton.cdiv(groups, _GROUPS),)](
            packed,
            scale_e4m3,
            out,
            fault,
            groups,
            global_scale.value,
            DIVIDES=global_scale.convention is GlobalConvention.DIVISOR,
            DTYPE=TRITON_DTYPE[dtype],
            GROUPS=_GROUPS,
            num_warps=_WARPS,
        )
    return out, fault


@triton.jit
def group_scale(scale_e4m3, global_scale, DIVIDES: tl.constexpr):
    """Return the float32 scale of groups, as `GlobalScale.apply`.

    Args:
        scale_e4m3: Any shape, uint32 holding one byte.
        global_scale: float32 scalar.
        DIVIDES: Whether the tensor's scale divides.
    """
    local = decode_e4m3_byte(scale_e4m3)
    if DIVIDES:
        result = tl.div_rn(local, global_scale + tl.zeros(local.shape, tl.float32))
    else:
        result = local * global_scale
    return result


@triton.jit
def _dequantize_nvfp4_kernel(
    packed_ptr,
    scale_ptr,
    out_ptr,
    fault_ptr,
    groups,
    global_scale,
    DIVIDES: tl.constexpr,
    DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    live = group < groups - start
    offsets = tl.max_contiguous(group[:, None] * 8 + tl.arange(0, 8)[None, :], [1, 4])
    packed = tl.load(packed_ptr + start * 8 + offsets, mask=live[:, None], other=0).to(tl.uint32)
    byte = tl.load(scale_ptr + start + group, mask=live, other=0).to(tl.uint32)
    scale = group_scale(byte, global_scale, DIVIDES)[:, None]
    low, high = decode_e2m1_byte(packed)
    values = tl.reshape(tl.join(low * scale, high * scale), (GROUPS, 16))
    values = to_dtype(values, DTYPE)
    offsets = tl.max_contiguous(group[:, None] * 16 + tl.arange(0, 16)[None, :], [1, 8])
    tl.store(out_ptr + start * 16 + offsets, values, mask=live[:, None])
    # A group holds an infinity exactly when its largest magnitude became one.
    largest = to_dtype(
        tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)[:, None] * scale, DTYPE
    )
    overflow = tl.max((largest == float("inf")).to(tl.int32), axis=1) > 0
    flag = fault_ptr + tl.zeros((GROUPS,), tl.int32)
    tl.store(flag, 1, mask=live & ((byte > 0x7E) | overflow))
