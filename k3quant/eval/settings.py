"""How an evaluation is done."""

from dataclasses import dataclass
from typing import Literal

import torch

from k3quant.errors import ResourceError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """How to evaluate.

    Attributes:
        ctx: Ids a window reads.
        stride: Ids between the starts of windows; None is `ctx`, windows that do not overlap.
        bos: Whether every window starts with the BOS id, beyond `ctx`; it is never scored.
        dtype: Of activations and decoded weights; norms, router, recurrent state, softmaxes and
            logits are float32 in either case.
        device: Where to compute.
        vram_bytes: Bound of the device's memory; None takes nine tenths of what is free.
        ram_bytes: Bound of the memory; tokens that do not fit together are evaluated in several
            passes over the checkpoint. None is no bound: one pass.
        ahead_bytes: Bytes that are read ahead of the computation.
        read_threads: Reads at a time.
        teacher_forced: Whether a comparison also feeds each of the candidate's layers with what
            the reference's read; it computes the candidate twice and reads it once.
        noise_floor: Whether a comparison also walks the reference a second time with its sums in
            another order.
    """

    ctx: int = 512
    stride: int | None = None
    bos: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    ahead_bytes: int = 1 << 30
    read_threads: int = 4
    teacher_forced: bool = True
    noise_floor: bool = False

    def __post_init__(self) -> None:
        if self.ctx < 1:
            raise UsageError(f"ctx: expected at least 1, got {self.ctx}")
        if self.stride is not None and not 1 <= self.stride <= self.ctx:
            raise UsageError(f"stride: expected 1 to ctx {self.ctx}, got {self.stride}")
        if self.dtype not in ("float32", "bfloat16"):
            raise UsageError(f"dtype: expected float32 or bfloat16, got {self.dtype}")
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"device: expected cpu or cuda, got {self.device}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ResourceError(
                "device: expected a CUDA device, got none that torch can use",
                hint="install a build of torch with CUDA, or leave out --device",
            )
        if self.vram_bytes is not None and self.device == "cpu":
            raise UsageError("vram: expected --device cuda with it, got cpu")
        if self.read_threads < 1:
            raise UsageError(f"read_threads: expected at least 1, got {self.read_threads}")

    @property
    def pass_bytes(self) -> int | None:
        """Bound that tokens are cut into passes by; a device plans for all of them at once."""
        return self.ram_bytes if self.device == "cpu" else None

    @property
    def step(self) -> int:
        """Ids between the starts of windows."""
        return self.ctx if self.stride is None else self.stride
