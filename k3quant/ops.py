"""The one place that chooses between a kernel and its reference: tensors on a GPU take the kernel.

Every function takes and returns what the reference of the same name does and raises the same
errors; on the processor it is the reference, and triton is never imported. The other formats'
conversions are in `dense_ops`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3quant.formats import (
    cast_fp8,
    cast_nvfp4,
    casts,
    fast_stats,
    faults,
    mxfp4,
)
from k3quant.formats.blocks import first_place, split_runs
from k3quant.formats.cast_counts import CastCounts
from k3quant.formats.e2m1 import decode_e2m1, unpack_nibbles
from k3quant.formats.e8m0 import check_scales, decode_e8m0
from k3quant.formats.fp8_block import FP8_BLOCK_SHAPE
from k3quant.formats.mx import MX_BLOCK_SIZE, ScaleRounding
from k3quant.formats.nvfp4_exponent import Needs
from k3quant.formats.tiles import BlockShape
from k3quant.models import delta_rule as delta_rules
from k3quant.models import kda, mla, moe, norms, residual, router
from k3quant.models import situ as situ_gate
from k3quant.models.k3_config import MlaConfig, MoeConfig

if TYPE_CHECKING:
    from k3quant.kernels.expert_tiles import SortedSlots
    from k3quant.kernels.moe_grouped_mm import PackedExperts

_BLOCK_BYTES = MX_BLOCK_SIZE // 2
BF16 = torch.bfloat16


def dequantize_mxfp4(packed: Tensor, scale_e8m0: Tensor, *, dtype: torch.dtype = BF16) -> Tensor:
    """Compute code * 2^(scale - 127), as `mxfp4.dequantize_mxfp4`."""
    if not packed.is_cuda:
        return mxfp4.dequantize_mxfp4(packed, scale_e8m0, dtype=dtype)
    from k3quant.kernels.mxfp4_dequantize import dequantize_mxfp4 as kernel

    out, suspect = kernel(packed, scale_e8m0, dtype=dtype)
    if suspect:
        _refuse_overflow(packed, scale_e8m0, dtype)
    return out


def dequantize_experts(
    packed: Tensor, scale_e8m0: Tensor, experts: Sequence[int], *, dtype: torch.dtype = BF16
) -> Tensor:
    """Decode some of `[E, rows, cols]` experts, `[n, rows, cols]` in the order asked for."""
    if any(not 0 <= expert < len(packed) for expert in experts):
        raise ValueError(f"experts: expected indices below {len(packed)}, got {list(experts)}")
    wanted = torch.tensor(experts, dtype=torch.int64, device=packed.device)
    if not packed.is_cuda:
        return mxfp4.dequantize_mxfp4(packed[wanted], scale_e8m0[wanted], dtype=dtype)
    from k3quant.kernels.mxfp4_dequantize import dequantize_mxfp4 as kernel

    out, suspect = kernel(packed, scale_e8m0, dtype=dtype, experts=wanted)
    if suspect:
        _refuse_overflow(packed[wanted], scale_e8m0[wanted], dtype)
    return out


def quantize_mxfp4(weight: Tensor, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """Round values to MXFP4, as `mxfp4.quantize_mxfp4`."""
    if weight.is_cuda:
        from k3quant.kernels.mxfp4_quantize import quantize_mxfp4 as kernel

        packed, scale_e8m0, fault = kernel(weight, rounding)
        if not fault:
            return packed, scale_e8m0
    return mxfp4.quantize_mxfp4(weight, rounding)


def cast_mxfp4_to_mxfp8(packed: Tensor, scale_e8m0: Tensor) -> tuple[Tensor, Tensor, CastCounts]:
    """Write codes as E4M3 under the same scales, as `casts.cast_mxfp4_to_mxfp8`."""
    if not packed.is_cuda:
        return casts.cast_mxfp4_to_mxfp8(packed, scale_e8m0)
    from k3quant.kernels.mxfp4_to_mxfp8 import cast_mxfp4_to_mxfp8 as kernel

    codes, fault = kernel(packed, scale_e8m0)
    if fault:
        check_scales(scale_e8m0)
    blocks = scale_e8m0.numel()
    return codes, scale_e8m0, CastCounts(blocks=blocks, exact=blocks)


def cast_mxfp4_to_fp8(
    packed: Tensor, scale_e8m0: Tensor, *, block_shape: BlockShape = FP8_BLOCK_SHAPE
) -> cast_fp8.Fp8Cast:
    """Write codes as E4M3 under one power of two a tile, as `cast_fp8.cast_mxfp4_to_fp8`."""
    if not packed.is_cuda:
        return cast_fp8.cast_mxfp4_to_fp8(packed, scale_e8m0, block_shape=block_shape)
    from k3quant.kernels.mxfp4_to_fp8_block import cast_mxfp4_to_fp8 as kernel

    cast = kernel(packed, scale_e8m0, block_shape=block_shape)
    lost, flushed, nan = cast.counts.tolist()
    if nan:
        check_scales(scale_e8m0)
    blocks = scale_e8m0.numel()
    counts = CastCounts(blocks=blocks, exact=blocks - lost, flushed=flushed)
    return cast_fp8.Fp8Cast(cast.codes, cast.scale, counts)


def count_scale_needs(packed: Tensor, scale_e8m0: Tensor) -> Needs:
    """Count what group scales a weight needs, as `cast_nvfp4.count_scale_needs`."""
    if not packed.is_cuda:
        return cast_nvfp4.count_scale_needs(packed, scale_e8m0)
    from k3quant.kernels.mxfp4_statistics import count_scale_needs as kernel

    check_scales(scale_e8m0)
    needs: Needs = kernel(packed, scale_e8m0).cpu().numpy()
    return needs


def cast_mxfp4_to_nvfp4(
    packed: Tensor, scale_e8m0: Tensor, *, exponent: int
) -> cast_nvfp4.Nvfp4Cast:
    """Turn scale bytes into group scales, as `cast_nvfp4.cast_mxfp4_to_nvfp4`."""
    if not packed.is_cuda:
        return cast_nvfp4.cast_mxfp4_to_nvfp4(packed, scale_e8m0, exponent=exponent)
    from k3quant.kernels import mxfp4_to_nvfp4

    out, scale_e4m3, kept = mxfp4_to_nvfp4.rescale_mxfp4_to_nvfp4(
        packed, scale_e8m0, exponent=exponent
    )
    lost, rescued, nan = kept.tolist()
    if nan:
        check_scales(scale_e8m0)
    blocks = scale_e8m0.numel() - lost
    counts = CastCounts(blocks=blocks, exact=blocks, rescued=rescued)
    if lost:
        # Which scale is best for halves that no scale keeps is a search: the reference does it.
        pairs = scale_e4m3.view(-1, 2)
        rows = (pairs == mxfp4_to_nvfp4.LOST).any(dim=-1).nonzero()[:, 0]
        lost_packed, lost_scale = packed.reshape(-1, _BLOCK_BYTES), scale_e8m0.reshape(-1, 1)
        cast = cast_nvfp4.cast_mxfp4_to_nvfp4(
            lost_packed[rows], lost_scale[rows], exponent=exponent
        )
        out.view(-1, _BLOCK_BYTES)[rows], pairs[rows] = cast.packed, cast.scale_e4m3
        counts = counts + cast.counts
    return cast_nvfp4.Nvfp4Cast(out, scale_e4m3, counts)


def count_mxfp4(packed: Tensor, scale_e8m0: Tensor) -> fast_stats.Mxfp4Stats:
    """Count scale bytes, packed bytes and zero blocks, as `fast_stats.count_mxfp4`."""
    if not packed.is_cuda:
        arrays = (x.contiguous().numpy() for x in (packed, scale_e8m0))
        return fast_stats.count_mxfp4(*arrays)
    from k3quant.kernels.mxfp4_statistics import count_mxfp4 as kernel

    counts = kernel(packed, scale_e8m0)
    return fast_stats.Mxfp4Stats(
        scales=counts.scales.cpu().numpy(),
        bytes=counts.bytes.cpu().numpy(),
        zero_blocks=int(counts.zero_blocks),
    )


def situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """Compute SiTU, as `models.situ.situ`."""
    if not gate.is_cuda:
        return situ_gate.situ(gate, up, beta=beta, linear_beta=linear_beta)
    from k3quant.kernels.situ_and_mul import situ_and_mul

    flat = [x.reshape(-1, x.shape[-1]) for x in (gate, up)]
    return situ_and_mul(*flat, beta=beta, linear_beta=linear_beta).view(gate.shape)


def mix_blocks(stream: residual.Residual, norm: Tensor, proj: Tensor, *, eps: float) -> Tensor:
    """Average blocks and prefix by their scores, as `residual.mix_blocks`."""
    if not (stream.prefix.is_cuda and stream.blocks):
        return residual.mix_blocks(stream, norm, proj, eps=eps)
    from k3quant.kernels.attn_res_mix import attn_res_mix

    sources = [x.reshape(-1, x.shape[-1]) for x in (*stream.blocks, stream.prefix)]
    return attn_res_mix(sources, norm, proj, eps=eps).view(stream.prefix.shape)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float) -> Tensor:
    """Norm, weigh and gate, as `norms.gated_rms_norm`."""
    if not x.is_cuda:
        return norms.gated_rms_norm(x, weight, gate, eps=eps)
    from k3quant.kernels.rms_norm_gated import rms_norm_gated

    flat, gates = (t.reshape(-1, t.shape[-1]) for t in (x, gate))
    return rms_norm_gated(flat, weight, gates, eps=eps).view(gate.shape)


def short_convolution(u: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve causally and take SiLU, as `kda.short_convolution`."""
    if not u.is_cuda:
        return kda.short_convolution(u, weight, before)
    from k3quant.kernels.short_conv import short_conv

    return short_conv(u, weight, before)


def route(x: Tensor, gate: Tensor, bias: Tensor, moe: MoeConfig) -> router.Routing:
    """Choose experts for each token, as `router.route`; experts in groups take the reference."""
    if not x.is_cuda or moe.num_expert_group > 1:
        return router.route(x, gate, bias, moe)
    from k3quant.kernels.router_topk import router_topk

    idx, weight = router_topk(
        linear(x.float(), gate.float()),
        bias.float(),
        k=moe.num_experts_per_token,
        sigmoid=moe.moe_router_activation_func == "sigmoid",
        renormalize=moe.moe_renormalize and moe.num_experts_per_token > 1,
        scaling=moe.routed_scaling_factor,
        sum_eps=router.WEIGHT_SUM_EPS,
    )
    return router.Routing(idx, weight)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    bounded: bool,
    precise: bool,
) -> tuple[Tensor, Tensor]:
    """Run KDA's recurrence, as `delta_rule.recurrent_delta_rule`.

    On a GPU few tokens are single steps of a kernel; more go to fla in bfloat16, or to the chunked
    reference when `precise` or without fla. `bounded` says that no log decay is below -5.
    """
    few = q.shape[1] <= kda.RECURRENT_TOKENS
    if q.is_cuda and few:
        from k3quant.kernels.kda_decode import kda_decode

        return kda_decode(q, k, v, log_decay, beta, state)
    if q.is_cuda and not precise:
        from k3quant.kernels import kda_prefill

        if kda_prefill.is_available():
            q, k, v = q.to(BF16), k.to(BF16), v.to(BF16)
            return kda_prefill.kda_prefill(q, k, v, log_decay, beta, state, bounded=bounded)
    rule = delta_rules.recurrent_delta_rule if few else delta_rules.chunked_delta_rule
    return rule(q, k, v, log_decay, beta, state)


def routed_experts(
    z: Tensor,
    routing: router.Routing,
    experts: "PackedExperts",
    *,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """Sum the chosen experts' outputs from MXFP4 weights, as `moe.routed_experts` under SiTU.

    Only for bfloat16 on a GPU: elsewhere experts are decoded one by one and go to the reference.
    """
    from k3quant.kernels.moe_grouped_mm import moe_grouped_mm

    return moe_grouped_mm(
        z, routing.topk_idx, routing.topk_weight, experts, beta=beta, linear_beta=linear_beta
    )


def expert_outputs(
    z: Tensor,
    order: "SortedSlots",
    experts: "PackedExperts",
    *,
    beta: float,
    linear_beta: float,
    chunk_bytes: int,
) -> Tensor:
    """Return each sorted slot's output from MXFP4 weights; where, as `routed_experts`."""
    from k3quant.kernels.moe_grouped_mm import expert_outputs as kernel

    return kernel(z, order, experts, beta=beta, linear_beta=linear_beta, chunk_bytes=chunk_bytes)


def add_outputs(out: Tensor, place: Tensor, weight: Tensor, total: Tensor, start: int) -> None:
    """Add a run of sorted slots' outputs to their tokens' sums, as `moe.add_outputs`."""
    if not out.is_cuda:
        moe.add_outputs(out, place, weight, total, start)
        return
    from k3quant.kernels.moe_accumulate import moe_accumulate

    moe_accumulate(out, place, weight, total, start)


def attend(
    queried: Tensor,
    q_weight: Tensor,
    latent: Tensor,
    kv_weight: Tensor,
    k_rope: Tensor,
    config: MlaConfig,
) -> Tensor:
    """Attend causally to latent keys and values, as `mla.attend_in_blocks`.

    On a GPU in bfloat16 by torch's fused attention; float32 takes the reference.
    """
    if not queried.is_cuda or queried.dtype is torch.float32:
        return mla.attend_in_blocks(queried, q_weight, latent, kv_weight, k_rope, config)
    from k3quant.kernels.mla_attention import mla_attend

    return mla_attend(
        queried,
        q_weight,
        latent,
        kv_weight,
        k_rope,
        heads=config.num_heads,
        nope=config.qk_nope_head_dim,
        v_dim=config.v_head_dim,
    )


def _refuse_overflow(packed: Tensor, scale_e8m0: Tensor, dtype: torch.dtype) -> None:
    """Raise what the reference does for NaN scales and values beyond `dtype`, if there are any."""
    check_scales(scale_e8m0)
    large = scale_e8m0 > 127
    codes = decode_e2m1(unpack_nibbles(split_runs(packed, _BLOCK_BYTES)[large]))
    infinite = torch.isinf((codes * decode_e8m0(scale_e8m0[large])[:, None]).to(dtype)).any(dim=-1)
    if bool(infinite.any()):
        bad = torch.zeros_like(large).masked_scatter_(large, infinite)
        cause = f"infinity under scale {scale_e8m0[bad][0].item()}"
        raise faults.overflow(first_place(bad), str(dtype).removeprefix("torch."), cause)
