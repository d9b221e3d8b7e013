import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from k3quant.errors import ExitCode, SchemaError, ValuesError
from k3quant.eval.weights import StoredPart, decode_weight


def _part(name, dtype, tensor):
    return StoredPart(
        name, dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8)
    )


def _stored(oracle, name):
    for shard in sorted(oracle.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            if name in file.keys():  # noqa: SIM118  no mapping
                return file.get_tensor(name)
    raise AssertionError(name)


ZEROS = torch.zeros(2, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    "module", ["layers.1.block_sparse_moe.experts.2.w1", "layers.1.block_sparse_moe.experts.2.w2",
               "layers.8.block_sparse_moe.experts.15.w3"],
    ids=["zero-and-tiny-groups", "down", "last-layer"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_decodes_to_the_golden_values(oracle, data, module, dtype):
    stem = f"language_model.model.{module}"
    golden = load_file(data / "oracle" / "golden" / "dequant.safetensors")[f"{stem}.weight"]
    parts = {
        part: _part(f"{stem}.{part}", "U8", _stored(oracle, f"{stem}.{part}"))
        for part in ("weight_packed", "weight_scale")
    }
    weight = decode_weight(parts, dtype=dtype)
    assert weight.dtype is dtype
    assert torch.equal(weight.float(), golden)


@pytest.mark.parametrize("name", ["BF16", "F16", "F32"])
def test_plain_weights_are_cast_and_keep_nan(name):
    stored = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[name]
    values = torch.tensor([[1.5, -2.0], [float("nan"), float("inf")]])
    weight = decode_weight({"weight": _part("w", name, values.to(stored))}, dtype=torch.float32)
    torch.testing.assert_close(weight, values, equal_nan=True)


def test_a_nan_scale_is_named():
    parts = {
        "weight_packed": _part("m.weight_packed", "U8", torch.zeros(2, 16, dtype=torch.uint8)),
        "weight_scale": _part(
            "m.weight_scale", "U8", torch.tensor([[127], [255]], dtype=torch.uint8)
        ),
    }
    with pytest.raises(ValuesError, match=r"m\.weight_packed: .*255") as caught:
        decode_weight(parts, dtype=torch.float32)
    assert caught.value.exit_code is ExitCode.VALUES


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"weight": _part("w", "I8", torch.zeros(2, dtype=torch.int8))}, id="integers"),
        pytest.param(
            {"weight_packed": _part("w", "U8", torch.zeros(2, 16, dtype=torch.uint8))}, id="half"
        ),
    ],
)
def test_an_unknown_storage_is_refused(parts):
    with pytest.raises(SchemaError, match=r"w: expected"):
        decode_weight(parts, dtype=torch.float32)
