"""How device memory is shared out: planned before a run, and kept."""

from dataclasses import dataclass

from k3quant.errors import ResourceError
from k3quant.sizes import format_size

PIECE_BYTES = 64 << 20
"""The longest run of a file that one thread reads without asking for the next."""

STEP_BYTES = 4 << 20
"""What it reads at a time; all threads' buffers together fit a processor's last cache."""

BUFFERS = 2
"""Pinned buffers of a step for each thread: one is read into while the other is copied."""

CHUNK_BYTES = 2 << 30
SMALL_CHUNK_BYTES = 512 << 20
AHEAD_CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a model and its tokens ask for, in bytes.

    Attributes:
        own: A layer's own tensors, the largest layer's.
        expert: One expert.
        experts: Experts of a layer; 0 without.
        work: Activations of the tokens at hand.
        token: What a token keeps between layers.
    """

    own: int
    expert: int
    experts: int
    work: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A plan for the device.

    Attributes:
        own_arenas: Arenas for layers' own tensors.
        expert_arenas: Arenas for experts.
        chunk_experts: Experts of an arena.
        stream_on_device: Whether the residual stream stays on the device between layers.
        device_bytes: What all of it takes on the device.
        host_bytes: Pinned buffers, and the stream where the host holds it.
    """

    own_arenas: int
    expert_arenas: int
    chunk_experts: int
    stream_on_device: bool
    device_bytes: int
    host_bytes: int


def plan_ahead(*, own: int, expert: int, experts: int, ahead_bytes: int) -> Budget:
    """Share out what may be read ahead where it is also computed: a layer's own, and experts.

    Args:
        own: A layer's own tensors, the largest layer's, in bytes.
        expert: One expert, in bytes.
        experts: Experts of a layer; 0 without.
        ahead_bytes: Bytes of experts that are read ahead; two experts always are.
    """
    chunk = max(1, min(experts, ahead_bytes // AHEAD_CHUNKS // max(1, expert))) if experts else 0
    count = max(2, min(AHEAD_CHUNKS, -(-2 * experts // chunk))) if experts else 0
    return Budget(
        own_arenas=1,
        expert_arenas=count,
        chunk_experts=chunk,
        stream_on_device=True,
        device_bytes=own + count * chunk * expert,
        host_bytes=0,
    )


def plan_budget(
    need: Need, *, tokens: int, threads: int, vram_bytes: int, ram_bytes: int | None
) -> Budget:
    """Share out device memory: work and two layers' own tensors, then the stream, then chunks.

    Two layers of experts in flight are enough to hide the reads; what is left stays free.

    Args:
        need: What is asked for.
        tokens: Tokens of the run.
        threads: Reads at a time.
        vram_bytes: Device memory that may be used.
        ram_bytes: Host memory that may be used; None is no bound.

    Raises:
        ResourceError: Not even the smallest plan fits; says how much would.
    """
    fixed = need.work + 2 * need.own
    stream = tokens * need.token
    staging = threads * BUFFERS * STEP_BYTES
    least = 2 * max(1, SMALL_CHUNK_BYTES // need.expert) * need.expert if need.experts else 0
    on_device = fixed + stream + 2 * least <= vram_bytes
    left = vram_bytes - fixed - (stream if on_device else 0)
    if left < least:
        raise ResourceError(
            f"vram: expected at least {format_size(fixed + least)}, got {format_size(vram_bytes)}",
            hint="raise --vram or shorten --ctx",
        )
    host = staging + (0 if on_device else stream)
    if ram_bytes is not None and host > ram_bytes:
        raise ResourceError(
            f"ram: expected at least {format_size(host)}, got {format_size(ram_bytes)}",
            hint="raise --ram, or score fewer tokens at a time",
        )
    size = CHUNK_BYTES if left >= 8 * CHUNK_BYTES else SMALL_CHUNK_BYTES
    chunk = max(1, min(need.experts, size // max(1, need.expert))) if need.experts else 0
    count = 0
    if need.experts:
        ahead = -(-2 * need.experts // chunk)
        count = max(2, min(left // (chunk * need.expert), ahead))
    return Budget(
        own_arenas=2,
        expert_arenas=count,
        chunk_experts=chunk,
        stream_on_device=on_device,
        device_bytes=fixed + (stream if on_device else 0) + count * chunk * need.expert,
        host_bytes=host,
    )
