"""`ops` chooses kernels for tensors on a GPU; where there is none, tensors pretend to be there."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from k3quant import dense_ops, ops
from k3quant.errors import K3QuantError
from k3quant.formats import (
    cast_fp8,
    cast_nvfp4,
    casts,
    fast_stats,
    fp8_block,
    int4,
    int8_channel,
    mxfp4,
    mxfp8,
    nvfp4,
)
from k3quant.formats.mx import ScaleRounding
from k3quant.formats.nvfp4 import GlobalConvention, GlobalScale
from k3quant.models import delta_rule, kda, norms, residual, router, situ
from k3quant.models.k3_config import MoeConfig

SCALE = GlobalScale(value=0.125, convention=GlobalConvention.MULTIPLIER)


def mxfp4_pair(byte: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(25)
    packed = torch.randint(0, 256, (2, 3, 64), dtype=torch.uint8, generator=generator)
    scales = torch.randint(105, 131, (2, 3, 4), dtype=torch.uint8, generator=generator)
    if byte is not None:
        scales[1, 2, 3] = byte
        packed[1, 2, -1] = 0x77
    return [packed, scales]


def weight(value: float | None = None) -> list[torch.Tensor]:
    values = torch.randn((2, 3, 64), generator=torch.Generator().manual_seed(26)).bfloat16()
    if value is not None:
        values[1, 2, 33] = value
    return [values]


def fp8_pair(code: int = 0x38) -> list[torch.Tensor]:
    codes = torch.arange(126, dtype=torch.uint8).reshape(2, 63)
    codes[1, 3] = code
    return [codes, torch.full((1, 1), 0.5)]


def nvfp4_pair(byte: int = 0x40) -> list[torch.Tensor]:
    packed, _ = mxfp4_pair()
    scales = torch.full((2, 3, 8), 0x38, dtype=torch.uint8)
    scales[1, 0, 2] = byte
    return [packed, scales]


def int4_pair(value: float = 2.0) -> list[torch.Tensor]:
    words = torch.arange(24, dtype=torch.int32).reshape(3, 8) * 0x01234567
    scale = torch.full((3, 2), 0.5)
    scale[2, 1] = value
    return [words, scale]


def mxfp8_pair(code: int = 0x38, byte: int = 120) -> list[torch.Tensor]:
    codes = torch.arange(126, dtype=torch.uint8).repeat(2)[:192].reshape(2, 3, 32)
    codes[1, 2, 5] = code
    scales = torch.full((2, 3, 1), 120, dtype=torch.uint8)
    scales[0, 1] = byte
    return [codes, scales]


def int8_pair(value: float = 0.5) -> list[torch.Tensor]:
    codes = torch.arange(-128, 128, dtype=torch.int8).reshape(4, 64)
    scale = torch.full((4, 1), 0.375)
    scale[3] = value
    return [codes, scale]


GROUPED = {"group_size": 32}
UNGROUPED = {"cols": 64, "group_size": 32}
PAIRS: list[Any] = [
    pytest.param(ops.dequantize_mxfp4, mxfp4.dequantize_mxfp4, mxfp4_pair, id="dequantize-mxfp4"),
    pytest.param(
        partial(ops.dequantize_mxfp4, dtype=torch.float16),
        partial(mxfp4.dequantize_mxfp4, dtype=torch.float16),
        mxfp4_pair,
        id="dequantize-mxfp4-float16",
    ),
    pytest.param(
        ops.dequantize_mxfp4,
        mxfp4.dequantize_mxfp4,
        partial(mxfp4_pair, 255),
        id="dequantize-mxfp4-nan",
    ),
    pytest.param(
        ops.dequantize_mxfp4,
        mxfp4.dequantize_mxfp4,
        partial(mxfp4_pair, 253),
        id="dequantize-mxfp4-overflow",
    ),
    pytest.param(
        partial(ops.quantize_mxfp4, rounding=ScaleRounding.EVEN),
        partial(mxfp4.quantize_mxfp4, rounding=ScaleRounding.EVEN),
        weight,
        id="quantize-mxfp4",
    ),
    pytest.param(
        partial(ops.quantize_mxfp4, rounding=ScaleRounding.EVEN),
        partial(mxfp4.quantize_mxfp4, rounding=ScaleRounding.EVEN),
        partial(weight, float("nan")),
        id="quantize-mxfp4-nan",
    ),
    pytest.param(ops.cast_mxfp4_to_mxfp8, casts.cast_mxfp4_to_mxfp8, mxfp4_pair, id="to-mxfp8"),
    pytest.param(
        ops.cast_mxfp4_to_mxfp8,
        casts.cast_mxfp4_to_mxfp8,
        partial(mxfp4_pair, 255),
        id="to-mxfp8-nan",
    ),
    pytest.param(ops.cast_mxfp4_to_fp8, cast_fp8.cast_mxfp4_to_fp8, mxfp4_pair, id="to-fp8"),
    pytest.param(
        ops.cast_mxfp4_to_fp8,
        cast_fp8.cast_mxfp4_to_fp8,
        partial(mxfp4_pair, 255),
        id="to-fp8-nan",
    ),
    pytest.param(
        partial(ops.cast_mxfp4_to_nvfp4, exponent=-6),
        partial(cast_nvfp4.cast_mxfp4_to_nvfp4, exponent=-6),
        mxfp4_pair,
        id="to-nvfp4-with-lost-halves",
    ),
    pytest.param(
        partial(ops.cast_mxfp4_to_nvfp4, exponent=-6),
        partial(cast_nvfp4.cast_mxfp4_to_nvfp4, exponent=-6),
        partial(mxfp4_pair, 255),
        id="to-nvfp4-nan",
    ),
    pytest.param(ops.count_scale_needs, cast_nvfp4.count_scale_needs, mxfp4_pair, id="scale-needs"),
    pytest.param(
        ops.count_scale_needs,
        cast_nvfp4.count_scale_needs,
        partial(mxfp4_pair, 255),
        id="scale-needs-nan",
    ),
    pytest.param(
        partial(dense_ops.quantize_nvfp4, global_scale=SCALE),
        partial(nvfp4.quantize_nvfp4, global_scale=SCALE),
        weight,
        id="quantize-nvfp4",
    ),
    pytest.param(
        partial(dense_ops.quantize_nvfp4, global_scale=SCALE),
        partial(nvfp4.quantize_nvfp4, global_scale=SCALE),
        partial(weight, float("inf")),
        id="quantize-nvfp4-inf",
    ),
    pytest.param(
        partial(dense_ops.dequantize_nvfp4, global_scale=SCALE),
        partial(nvfp4.dequantize_nvfp4, global_scale=SCALE),
        nvfp4_pair,
        id="dequantize-nvfp4",
    ),
    pytest.param(
        partial(dense_ops.dequantize_nvfp4, global_scale=SCALE),
        partial(nvfp4.dequantize_nvfp4, global_scale=SCALE),
        partial(nvfp4_pair, 0x90),
        id="dequantize-nvfp4-negative-scale",
    ),
    pytest.param(
        dense_ops.quantize_fp8_block, fp8_block.quantize_fp8_block, weight, id="quantize-fp8"
    ),
    pytest.param(
        dense_ops.quantize_fp8_block,
        fp8_block.quantize_fp8_block,
        partial(weight, float("nan")),
        id="quantize-fp8-nan",
    ),
    pytest.param(
        dense_ops.dequantize_fp8_block,
        fp8_block.dequantize_fp8_block,
        fp8_pair,
        id="dequantize-fp8",
    ),
    pytest.param(
        dense_ops.dequantize_fp8_block,
        fp8_block.dequantize_fp8_block,
        partial(fp8_pair, 0x7F),
        id="dequantize-fp8-nan",
    ),
    pytest.param(
        partial(dense_ops.quantize_int4, **GROUPED),
        partial(int4.quantize_int4, **GROUPED),
        weight,
        id="quantize-int4",
    ),
    pytest.param(
        partial(dense_ops.quantize_int4, **GROUPED),
        partial(int4.quantize_int4, **GROUPED),
        partial(weight, float("nan")),
        id="quantize-int4-nan",
    ),
    pytest.param(
        partial(dense_ops.dequantize_int4, **UNGROUPED),
        partial(int4.dequantize_int4, **UNGROUPED),
        int4_pair,
        id="dequantize-int4",
    ),
    pytest.param(
        partial(dense_ops.dequantize_int4, **UNGROUPED),
        partial(int4.dequantize_int4, **UNGROUPED),
        partial(int4_pair, -1.0),
        id="dequantize-int4-negative-scale",
    ),
    pytest.param(
        partial(dense_ops.quantize_mxfp8, rounding=ScaleRounding.EVEN),
        partial(mxfp8.quantize_mxfp8, rounding=ScaleRounding.EVEN),
        weight,
        id="quantize-mxfp8",
    ),
    pytest.param(
        partial(dense_ops.quantize_mxfp8, rounding=ScaleRounding.EVEN),
        partial(mxfp8.quantize_mxfp8, rounding=ScaleRounding.EVEN),
        partial(weight, float("nan")),
        id="quantize-mxfp8-nan",
    ),
    pytest.param(
        dense_ops.dequantize_mxfp8, mxfp8.dequantize_mxfp8, mxfp8_pair, id="dequantize-mxfp8"
    ),
    pytest.param(
        dense_ops.dequantize_mxfp8,
        mxfp8.dequantize_mxfp8,
        partial(mxfp8_pair, 0xFF),
        id="dequantize-mxfp8-nan",
    ),
    pytest.param(
        dense_ops.dequantize_mxfp8,
        mxfp8.dequantize_mxfp8,
        partial(mxfp8_pair, 0x38, 255),
        id="dequantize-mxfp8-nan-scale",
    ),
    pytest.param(
        dense_ops.quantize_int8_channel,
        int8_channel.quantize_int8_channel,
        weight,
        id="quantize-int8",
    ),
    pytest.param(
        dense_ops.quantize_int8_channel,
        int8_channel.quantize_int8_channel,
        partial(weight, float("inf")),
        id="quantize-int8-inf",
    ),
    pytest.param(
        dense_ops.dequantize_int8_channel,
        int8_channel.dequantize_int8_channel,
        int8_pair,
        id="dequantize-int8",
    ),
    pytest.param(
        dense_ops.dequantize_int8_channel,
        int8_channel.dequantize_int8_channel,
        partial(int8_pair, float("nan")),
        id="dequantize-int8-nan-scale",
    ),
    pytest.param(
        dense_ops.dequantize_int8_channel,
        int8_channel.dequantize_int8_channel,
        partial(int8_pair, 2.65e36),
        id="dequantize-int8-large-scale-that-fits",
    ),
]


@pytest.fixture
def on_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return how to move a tensor to the GPU; without one, all tensors claim to be there."""
    if device == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return lambda tensor: tensor.to(device)


def outcome(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Any:
    """Return the result, or the class and message of the error."""
    try:
        return function(*inputs)
    except K3QuantError as error:
        return type(error), str(error)


def flat(result: Any) -> list[Any]:
    """Return the parts of a result: arrays on the processor, all else as it is."""
    if isinstance(result, torch.Tensor):
        return [result.cpu().contiguous().view(torch.uint8).numpy()]
    if isinstance(result, tuple):
        return [part for item in result for part in flat(item)]
    return [result]


@pytest.mark.parametrize(("function", "reference", "make"), PAIRS)
def test_kernels_give_what_references_give(
    on_gpu: Callable[[torch.Tensor], torch.Tensor],
    function: Callable[..., Any],
    reference: Callable[..., Any],
    make: Callable[[], list[torch.Tensor]],
) -> None:
    got = flat(outcome(function, [on_gpu(x) for x in make()]))
    expected = flat(outcome(reference, make()))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b


@pytest.mark.parametrize(("function", "reference", "make"), PAIRS)
def test_the_processor_takes_the_reference(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    make: Callable[[], list[torch.Tensor]],
) -> None:
    got, expected = (flat(outcome(f, make())) for f in (function, reference))
    for a, b in zip(got, expected, strict=True):
        assert np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b


def test_statistics(on_gpu: Callable[[torch.Tensor], torch.Tensor]) -> None:
    packed, scales = mxfp4_pair(255)
    got = ops.count_mxfp4(on_gpu(packed), on_gpu(scales))
    expected = fast_stats.count_mxfp4(packed.numpy(), scales.numpy())
    assert np.array_equal(got.scales, expected.scales)
    assert np.array_equal(got.bytes, expected.bytes)
    assert got.zero_blocks == expected.zero_blocks


def test_listed_experts(
    on_gpu: Callable[[torch.Tensor], torch.Tensor], same_bits: Callable[..., bool]
) -> None:
    packed, scales = mxfp4_pair()
    got = ops.dequantize_experts(on_gpu(packed), on_gpu(scales), [1, 0])
    assert same_bits(got, mxfp4.dequantize_mxfp4(packed, scales).flip(0))
    with pytest.raises(ValueError, match=r"experts: expected indices below 2, got \[0, 2\]"):
        ops.dequantize_experts(on_gpu(packed), on_gpu(scales), [0, 2])


def test_large_scales_without_overflow_pass(
    on_gpu: Callable[[torch.Tensor], torch.Tensor], same_bits: Callable[..., bool]
) -> None:
    packed, scales = mxfp4_pair(253)
    packed[1, 2, -16:] = 0x55  # 3 * 2^126
    got = ops.dequantize_mxfp4(on_gpu(packed), on_gpu(scales))
    assert same_bits(got, mxfp4.dequantize_mxfp4(packed, scales))


def test_blocks_of_the_model(
    on_gpu: Callable[[torch.Tensor], torch.Tensor], error_ratio: Callable[..., float]
) -> None:
    generator = torch.Generator().manual_seed(27)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    bounds = {"beta": 4.0, "linear_beta": 25.0}
    gate, up = random(2, 3, 40), random(2, 3, 40)
    got = ops.situ(on_gpu(gate), on_gpu(up), **bounds)
    assert error_ratio(got, situ.situ(gate, up, **bounds)) < 1e-6

    stream = residual.Residual(random(2, 3, 40), (random(2, 3, 40), random(2, 3, 40)))
    moved = residual.Residual(on_gpu(stream.prefix), tuple(on_gpu(x) for x in stream.blocks))
    norm, proj = random(40), random(1, 40)
    got = ops.mix_blocks(moved, on_gpu(norm), on_gpu(proj), eps=1e-5)
    assert error_ratio(got, residual.mix_blocks(stream, norm, proj, eps=1e-5)) < 2e-6
    alone = residual.Residual(on_gpu(gate))
    assert ops.mix_blocks(alone, on_gpu(norm), on_gpu(proj), eps=1e-5) is alone.prefix

    got = ops.gated_rms_norm(on_gpu(gate), on_gpu(norm), on_gpu(up), eps=1e-5)
    assert error_ratio(got, norms.gated_rms_norm(gate, norm, up, eps=1e-5)) < 2e-6

    taps = random(40, 1, 4)
    got, after = ops.short_convolution(on_gpu(gate), on_gpu(taps), None)
    expected, expected_after = kda.short_convolution(gate, taps, None)
    assert error_ratio(got, expected) < 2e-6
    assert torch.equal(after.cpu(), expected_after)


@pytest.mark.parametrize("tokens", [2, 20], ids=["decode", "prefill"])
def test_delta_rule_in_float32(
    on_gpu: Callable[[torch.Tensor], torch.Tensor], error_ratio: Callable[..., float], tokens: int
) -> None:
    generator = torch.Generator().manual_seed(28)
    q, k, v, g = (torch.randn((1, tokens, 2, 16), generator=generator) for _ in range(4))
    k = k / k.norm(dim=-1, keepdim=True)
    inputs = [q, k, v, -g.abs(), torch.rand((1, tokens, 2), generator=generator)]
    got, state = ops.delta_rule(*(on_gpu(x) for x in inputs), bounded=False, precise=True)
    expected, expected_state = delta_rule.recurrent_delta_rule(*inputs)
    assert error_ratio(got, expected) < 1e-5
    assert error_ratio(state, expected_state) < 1e-5


@pytest.mark.parametrize("groups", [1, 2], ids=["one-group", "two-groups"])
def test_routing(
    on_gpu: Callable[[torch.Tensor], torch.Tensor], error_ratio: Callable[..., float], groups: int
) -> None:
    config = MoeConfig(
        num_experts=24,
        num_experts_per_token=5,
        num_shared_experts=0,
        moe_intermediate_size=32,
        routed_expert_hidden_size=None,
        latent_moe_use_norm=False,
        moe_router_activation_func="sigmoid",
        num_expert_group=groups,
        topk_group=1,
        moe_renormalize=True,
        routed_scaling_factor=2.5,
    )
    generator = torch.Generator().manual_seed(29)
    x, gate = (torch.randn((n, 40), generator=generator) for n in (7, 24))
    inputs = [x, gate, torch.randn(24, generator=generator) / 10]
    got = ops.route(*(on_gpu(t) for t in inputs), config)
    expected = router.route(*inputs, config)
    assert torch.equal(got.topk_idx.cpu(), expected.topk_idx)
    assert error_ratio(got.topk_weight, expected.topk_weight) < 1e-5


def test_the_processor_never_loads_triton() -> None:
    code = (
        "import sys, torch; from k3quant import dense_ops, ops\n"
        "from k3quant.formats.mx import ScaleRounding\n"
        "packed, scales = ops.quantize_mxfp4(torch.ones(2, 32), ScaleRounding.EVEN)\n"
        "assert ops.dequantize_mxfp4(packed, scales).eq(1).all()\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
