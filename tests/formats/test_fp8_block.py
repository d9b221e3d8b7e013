import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3quant.errors import SchemaError, ValuesError
from k3quant.formats.fp8_block import dequantize_fp8_block, quantize_fp8_block


def test_ragged_tensor_has_a_scale_for_each_short_tile():
    weight = torch.randn(200, 96, generator=torch.Generator().manual_seed(2))
    codes, scale = quantize_fp8_block(weight)
    assert codes.shape == (200, 96)
    assert scale.shape == (2, 1)
    tiles = torch.stack((weight[:128].abs().max(), weight[128:].abs().max())) / 448
    assert torch.equal(scale[:, 0], tiles)


@pytest.mark.parametrize("shape", [(1, 1), (129, 257), (3, 130, 64), (0, 128)], ids=str)
def test_error_is_at_most_half_a_step(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    codes, scale = quantize_fp8_block(weight)
    back = dequantize_fp8_block(codes, scale, dtype=torch.float32)
    assert back.shape == shape
    # Half a step is 2^-4 of the value, or of the smallest subnormal; amax itself is below 5.
    bound = (weight.abs() / 15.9).clamp(min=5 / 448 * 2.0**-10)
    assert bool(((back - weight).abs() <= bound).all())


def test_tile_maximum_comes_back():
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    back = dequantize_fp8_block(*quantize_fp8_block(weight), dtype=torch.float32)
    for row, col in ((0, 0), (0, 128), (128, 0), (128, 128)):
        tile = (slice(row, row + 128), slice(col, col + 128))
        assert float(back[tile].abs().max()) == pytest.approx(
            float(weight[tile].abs().max()), rel=2**-22
        )


@pytest.mark.parametrize("position", [(0, 0), (255, 255)], ids=["first", "last"])
def test_one_element_in_zeros(position):
    weight = torch.zeros(256, 256)
    weight[position] = -3.0
    codes, scale = quantize_fp8_block(weight)
    assert bool((torch.isfinite(scale) & (scale > 0)).all())
    back = dequantize_fp8_block(codes, scale, dtype=torch.float32)
    assert float(back[position]) == pytest.approx(-3.0, rel=2**-22)
    back[position] = 0
    assert torch.equal(back, torch.zeros(256, 256))


def test_zero_tensor_has_scale_one_and_keeps_signs():
    codes, scale = quantize_fp8_block(torch.tensor([[0.0, -0.0]]))
    assert scale.tolist() == [[1.0]]
    assert codes.tolist() == [[0, 0x80]]


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3.4e38], ids=lambda value: f"{value:g}")
def test_extreme_tiles_stay_finite(amax):
    codes, scale = quantize_fp8_block(torch.full((2, 2), amax))
    back = dequantize_fp8_block(codes, scale, dtype=torch.float32)
    assert float((back - amax).abs().max()) <= max(amax / 16, 2.0**-126 * 2.0**-10)


def test_golden_codes_are_no_worse_than_compressed_tensors(golden):
    # It computes scale and quotient in bfloat16, so 3 % of its codes are one step off; ours must
    # be the nearer ones.
    weight = golden["fp8_block.x_f32_bf16exact"].float()
    theirs = dequantize_fp8_block(
        golden["fp8_block.compressed_tensors.bf16.codes"],
        golden["fp8_block.compressed_tensors.bf16.scale"],
        dtype=torch.float32,
    )
    codes, scale = quantize_fp8_block(weight)
    ours = dequantize_fp8_block(codes, scale, dtype=torch.float32)
    assert float((ours - weight).square().sum()) < float((theirs - weight).square().sum())
    same = codes == golden["fp8_block.compressed_tensors.bf16.codes"]
    assert float(same.float().mean()) > 0.96


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "infinity"])
def test_values_no_scale_can_hold_are_refused_by_tile(bad):
    weight = torch.zeros(256, 256)
    weight[3, 200] = bad
    with pytest.raises(ValuesError, match=r"tile \[0, 1\]: expected finite values"):
        quantize_fp8_block(weight)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_scales_that_are_not_positive_are_refused_by_place(scale):
    codes = torch.zeros(256, 128, dtype=torch.uint8)
    with pytest.raises(ValuesError, match=r"scale \[1, 0\]: expected a finite positive scale"):
        dequantize_fp8_block(codes, torch.tensor([[1.0], [scale]]))


def test_nan_codes_are_refused():
    codes = torch.zeros(2, 2, dtype=torch.uint8)
    codes[1, 0] = 0xFF
    with pytest.raises(ValuesError, match=r"element \[1, 0\]"):
        dequantize_fp8_block(codes, torch.ones(1, 1))


def test_overflow_is_refused():
    codes = torch.full((1, 1), 0x7E, dtype=torch.uint8)
    with pytest.raises(ValuesError, match="float16 holds, got infinity under scale 1000"):
        dequantize_fp8_block(codes, torch.tensor([[1000.0]]), dtype=torch.float16)


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (2,)], ids=str)
def test_scale_grids_of_other_shapes_are_refused(grid):
    with pytest.raises(SchemaError, match=r"scale grid: expected \[2, 1\]"):
        dequantize_fp8_block(torch.zeros(200, 96, dtype=torch.uint8), torch.ones(grid))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8), st.integers(1, 8))
def test_any_tile_covers_any_shape(rows, cols, tall, wide):
    weight = torch.arange(rows * cols, dtype=torch.float32).view(rows, cols) + 1
    codes, scale = quantize_fp8_block(weight, block_shape=(tall, wide))
    assert scale.shape == (-(-rows // tall), -(-cols // wide))
    back = dequantize_fp8_block(codes, scale, block_shape=(tall, wide), dtype=torch.float32)
    assert bool(((back - weight).abs() <= weight / 15.9).all())
