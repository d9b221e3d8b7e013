"""The gated MLP: dense layers, shared experts and each routed expert."""

from torch import Tensor
from torch.nn.functional import linear

from k3quant.models.rows import in_row_blocks
from k3quant.models.situ import Gate


def gated_mlp(
    x: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor, *, gate: Gate
) -> Tensor:
    """Compute down(gate(gate_proj x, up_proj x)), a block of rows at a time.

    Args:
        x: `[..., D]`.
        gate_proj: `[inner, D]`.
        up_proj: `[inner, D]`.
        down_proj: `[D, inner]`.
        gate: SiTU or SiLU.

    Returns:
        `[..., D]`.
    """

    def rows(x: Tensor) -> Tensor:
        return linear(gate(linear(x, gate_proj), linear(x, up_proj)), down_proj)

    return in_row_blocks(rows, (x,), width=gate_proj.shape[0])
