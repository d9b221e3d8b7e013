"""What a config amounts to: tensors, parameters, bytes, by family."""

import math
from dataclasses import dataclass

from k3quant.formats.dtypes import DTYPES
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import Family, num_shards, shard_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCount:
    """Totals of one family: stored tensors, logical parameters, stored bytes."""

    tensors: int
    parameters: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCount:
    """Totals of a config.

    Attributes:
        families: Totals by family.
        active_parameters: Parameters that one token uses: all but the embedding table and the
            vision side, with `num_experts_per_token` of the routed experts; lm_head counts.
    """

    families: dict[Family, FamilyCount]
    active_parameters: int

    @property
    def tensors(self) -> int:
        """Stored tensors."""
        return sum(count.tensors for count in self.families.values())

    @property
    def parameters(self) -> int:
        """Logical weights: a packed code counts one, scale bytes count nothing."""
        return sum(count.parameters for count in self.families.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(count.tensor_bytes for count in self.families.values())


def count_model(config: K3Config, *, packed: bool | None = None) -> ModelCount:
    """Count what a config implies.

    Args:
        config: The config.
        packed: Whether routed experts are MXFP4 pairs; None takes the config's word.
    """
    packed = config.packed_experts if packed is None else packed
    tensors = dict.fromkeys(Family, 0)
    parameters = dict.fromkeys(Family, 0)
    tensor_bytes = dict.fromkeys(Family, 0)
    for shard in range(1, num_shards(config) + 1):
        for spec in shard_tensors(config, shard, packed=packed):
            elements = math.prod(spec.shape)
            tensors[spec.family] += 1
            tensor_bytes[spec.family] += elements * DTYPES[spec.dtype].bits // 8
            if spec.part != "scale":
                parameters[spec.family] += elements * (2 if spec.part == "packed" else 1)
    routed = parameters[Family.ROUTED_EXPERTS]
    used = routed // config.moe.num_experts * config.moe.num_experts_per_token
    unused = (Family.EMBEDDING, Family.VISION, Family.PROJECTOR, Family.ROUTED_EXPERTS)
    active = sum(n for family, n in parameters.items() if family not in unused) + used
    families = {
        family: FamilyCount(
            tensors=tensors[family],
            parameters=parameters[family],
            tensor_bytes=tensor_bytes[family],
        )
        for family in Family
        if tensors[family]
    }
    return ModelCount(families=families, active_parameters=active)
