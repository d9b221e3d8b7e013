"""The noise floor: the reference against itself with its sums in another order.

A KL no larger than that is rounding, not damage.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from k3quant.eval.stream_gap import Gap


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """How far the reference is from itself.

    Attributes:
        kld_mean: Mean KL(reference || twin) of the scored positions, nats.
        kld_p99: Their 99th percentile.
        kld_max: The largest.
        top1_agreement: Share of scored positions with the same likeliest id.
        layers: Gap of the residual streams after each layer.
    """

    kld_mean: float
    kld_p99: float
    kld_max: float
    top1_agreement: float
    layers: tuple[Gap, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the part of a report's summary."""
        return {
            "kld_mean": self.kld_mean,
            "kld_p99": self.kld_p99,
            "kld_max": self.kld_max,
            "top1_agreement": self.top1_agreement,
            "layers": [
                {"layer": layer, "rel_error": gap.rel_error}
                for layer, gap in enumerate(self.layers)
            ],
        }


class OtherOrder(TorchFunctionMode):
    """Inside the `with`, matrix products sum their second half first and round once, at the end."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take the place of `linear` and leave everything else as it is."""
        if func is linear and len(args) == 2 and not kwargs:
            return _linear_in_halves(*args)
        return func(*args, **(kwargs or {}))


def _linear_in_halves(x: Tensor, weight: Tensor) -> Tensor:
    half = weight.shape[1] // 2
    front = _product(x[..., :half], weight[:, :half])
    return (_product(x[..., half:], weight[:, half:]) + front).to(x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return a float32 product; rounding the halves would be more than another order."""
    if x.is_cuda and x.dtype is not torch.float32:
        product = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32)
        return product.view(*x.shape[:-1], -1)
    return linear(x.float(), weight.float())
