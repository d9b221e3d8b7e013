"""The same conversions by other packages, in the same run; what is not installed is named."""

from collections.abc import Callable

import torch
from harness import Meter
from kernel_cases import SHAPES, random_mxfp4
from torch import Tensor

from k3quant.formats.mx import E2M1_VALUES, ScaleRounding
from k3quant.kernels.mxfp4_dequantize import dequantize_mxfp4
from k3quant.kernels.mxfp4_quantize import quantize_mxfp4


def peer_cases(meter: Meter, *, small: bool) -> None:
    """Measure dequantize and quantize of 64 experts by each package that is there."""
    count, shape = 2 if small else 64, SHAPES[0]
    packed, scales = random_mxfp4(count, *shape)
    weight, _ = dequantize_mxfp4(packed, scales)
    moved = packed.numel() + scales.numel() + 2 * weight.numel()
    facts = {"experts": count, "shape": list(shape)}
    expected = {"dequantize": weight, "quantize": quantize_mxfp4(weight, ScaleRounding.EVEN)[0]}
    runs, meter.runs = meter.runs, max(3, meter.runs // 4)
    peers: dict[str, Callable[[], tuple[str, Callable[[], Tensor]]]] = {
        "torch table": lambda: ("dequantize", _table(packed, scales)),
        "compressed-tensors": lambda: ("dequantize", _compressed_tensors(packed, scales)),
        "torchao": lambda: ("dequantize", _torchao(packed, scales)),
        "torchao to_mx": lambda: ("quantize", _torchao_quantize(weight)),
    }
    for peer, make in peers.items():
        try:
            name, work = make()
            # A peer that turns -0 into 0 still agrees: values are compared, not bits.
            facts["agrees"] = bool(
                torch.equal(work().reshape(expected[name].shape), expected[name])
            )
            meter.bandwidth(name, work, moved, peer=peer, **facts)
        except Exception as error:
            meter.result["failed"].append({"part": peer, "error": repr(error)[:600]})
            print(f"FAILED {peer}: {error!r:.400}", flush=True)
        torch.cuda.empty_cache()
    meter.runs = runs


def _table(packed: Tensor, scales: Tensor) -> Callable[[], Tensor]:
    """Look up both values of a byte under its scale in one table of 64 Ki words."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    power = torch.exp2(torch.arange(256, dtype=torch.float64) - 127)[:, None]
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15] * power, values[byte >> 4] * power), dim=-1)
    table = pairs.bfloat16().view(torch.int32).reshape(-1).cuda()

    def work() -> Tensor:
        index = scales.int().repeat_interleave(16, dim=-1).mul_(256).add_(packed)
        return table[index].view(torch.bfloat16)

    return work


def _compressed_tensors(packed: Tensor, scales: Tensor) -> Callable[[], Tensor]:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def work() -> Tensor:
        parts = [
            MXFP4PackedCompressor.decompress(
                {"weight_packed": packed[i], "weight_scale": scales[i]}, scheme
            )["weight"]
            for i in range(len(packed))
        ]
        return torch.cat(parts)

    return work


def _torchao(packed: Tensor, scales: Tensor) -> Callable[[], Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    flat = packed.view(-1, packed.shape[-1])
    scale = scales.view(-1, scales.shape[-1]).view(torch.float8_e8m0fnu)
    return lambda: to_dtype(flat, scale, torch.float4_e2m1fn_x2, 32, torch.bfloat16)


def _torchao_quantize(weight: Tensor) -> Callable[[], Tensor]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    flat = weight.view(-1, weight.shape[-1])
    even = ScaleCalculationMode.EVEN
    return lambda: to_mx(flat, torch.float4_e2m1fn_x2, 32, even)[1].view(torch.uint8)
