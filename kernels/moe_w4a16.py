"""Routed experts straight from MXFP4, for few tokens an expert; reference: models.moe.

Weights are decoded in registers and meet the tokens in tensor cores, so they cross memory once.
A word of eight codes yields pairs of codes i and i + 4 by shifts and masks alone. Inputs lie in
memory in the order in which those pairs reach the tensor core, see `interleave`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3quant.kernels import bf16_pairs
from k3quant.kernels.expert_tiles import ExpertTiles, SortedSlots
from k3quant.kernels.rounding import dot_bf16, to_bf16, to_float32
from k3quant.kernels.situ_and_mul import situ

MAX_SCALE = 128
"""The largest scale byte these kernels can decode: code * 2. Real weights stay far below."""

DEPTH = 128
"""The columns of both products are multiples of it."""

_ROWS = 128
_STEP = 128
_WARPS = 4
_STAGES = 3
_REGISTERS = 128  # leaves room for four programs a multiprocessor


def slots_of_tile(usual: float) -> int:
    """Return how many slots a tile should have, so that few weights are read twice.

    Args:
        usual: Mean slots an expert.
    """
    return next((slots for slots in (16, 32, 64) if 1.5 * usual <= slots), 128)


def gather_interleaved(z: Tensor, slots: SortedSlots, k: int) -> Tensor:
    """Copy each sorted slot's token, its columns in the order of `interleave`.

    Args:
        z: `[N, D]` bfloat16, contiguous.
        slots: The sorted slots.
        k: Slots a token.

    Returns:
        `[N k, D]` bfloat16.
    """
    count, width = len(slots.slot), z.shape[-1]
    out = torch.empty((count, width), dtype=z.dtype, device=z.device)
    if count:
        _gather_interleaved_kernel[(count, triton.cdiv(width, 1024))](
            z, slots.slot, out, width, SLOTS=k, COLS=1024, num_warps=4
        )
    return out


def gate_up(
    x: Tensor,
    w1: tuple[Tensor, Tensor],
    w3: tuple[Tensor, Tensor],
    slots: SortedSlots,
    tiles: ExpertTiles,
    *,
    rows: int,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """Compute SiTU of both projections of each slot.

    Args:
        x: `[slots, D]` bfloat16 from `gather_interleaved`.
        w1: Packed codes `[E, I, D / 2]` and scale bytes `[E, I, D / 32]`, none above `MAX_SCALE`.
        w3: Likewise.
        slots: The sorted slots.
        tiles: Tiles of `rows` slots.
        rows: 16, 32, 64 or 128.
        beta: Bound of SiTU's gate side.
        linear_beta: Bound of its linear side.

    Returns:
        `[slots, I]` bfloat16, columns interleaved.
    """
    inner, depth = w1[0].shape[1], x.shape[-1]
    out = torch.empty((len(x), inner), dtype=torch.bfloat16, device=x.device)
    if out.numel():
        _gate_up_kernel[(triton.cdiv(inner, _ROWS // 2) * len(tiles.expert),)](
            x,
            w1[0].view(torch.int32),
            w1[1].view(torch.int32),
            w3[0].view(torch.int32),
            w3[1].view(torch.int32),
            out,
            tiles.expert,
            tiles.first,
            slots.offsets,
            len(w1[0]),
            INNER=inner,
            DEPTH_ALL=depth,
            BETA=beta,
            LINEAR_BETA=linear_beta,
            ROWS=_ROWS,
            SLOTS=rows,
            DEPTH=_step(x.shape[-1]),
            num_warps=_WARPS,
            num_stages=_STAGES,
            maxnreg=_REGISTERS,
        )
    return out


def down(
    x: Tensor, w2: tuple[Tensor, Tensor], slots: SortedSlots, tiles: ExpertTiles, *, rows: int
) -> Tensor:
    """Project each slot down.

    Args:
        x: `[slots, I]` bfloat16 from `gate_up`.
        w2: Packed codes `[E, D, I / 2]` and scale bytes `[E, D, I / 32]`, none above `MAX_SCALE`.
        slots: The sorted slots.
        tiles: Tiles of `rows` slots.
        rows: 16, 32, 64 or 128.

    Returns:
        `[slots, D]` bfloat16.
    """
    width, inner = w2[0].shape[1], x.shape[-1]
    out = torch.empty((len(x), width), dtype=torch.bfloat16, device=x.device)
    if out.numel():
        _down_kernel[(triton.cdiv(width, _ROWS) * len(tiles.expert),)](
            x,
            w2[0].view(torch.int32),
            w2[1].view(torch.int32),
            out,
            tiles.expert,
            tiles.first,
            slots.offsets,
            len(w2[0]),
            WIDTH=width,
            INNER=inner,
            ROWS=_ROWS,
            SLOTS=rows,
            DEPTH=_step(x.shape[-1]),
            num_warps=_WARPS,
            num_stages=_STAGES,
            maxnreg=_REGISTERS,
        )
    return out


def _step(depth: int) -> int:
    """Return how many columns a step takes: long runs of a row keep memory pages open."""
    return DEPTH if depth % _STEP else _STEP


@triton.jit
def interleave(column):
    """Return which column of its 32 stands at a place.

    Lane j of a quad feeds the tensor core, in each of two steps, the columns 2j, 2j + 1, 2j + 8 and
    2j + 9; these shall be codes of word j, in pairs of i and i + 4.
    """
    place = column % 32
    word, step, half = (place >> 1) & 3, place >> 4, (place >> 3) & 1
    return column - place + 8 * word + 2 * step + half + 4 * (place & 1)


@triton.jit
def _gather_interleaved_kernel(
    z_ptr, slot_ptr, out_ptr, width, SLOTS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(slot_ptr + row) // SLOTS
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    x = tl.load(z_ptr + token * width + interleave(column), mask=column < width, other=0)
    tl.store(out_ptr + row * width + column, x, mask=column < width)


@triton.jit
def _halves(word):
    """Split words into their two bfloat16, a new last dimension."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _decode_tile(words, scales, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Decode `[ROWS, DEPTH / 8]` words under `[ROWS, DEPTH / 128]` words of four scale bytes."""
    exponents = tl.join(
        tl.join(scales & 0xFF, (scales >> 16) & 0xFF),
        tl.join((scales >> 8) & 0xFF, scales >> 24),
    )
    # 2^(scale - 1): what a code's bits are short of its value, times its scale.
    scale = ((tl.reshape(exponents, (ROWS, DEPTH // 32)) + 126) * 0x00800080)[:, :, None]
    words = tl.reshape(words, (ROWS, DEPTH // 32, 4))
    upper = words >> 8
    pairs = tl.join(
        tl.join(_low_pair(words, scale), _low_pair(upper, scale)),
        tl.join(_high_pair(words, scale), _high_pair(upper, scale)),
    )
    values = _halves(pairs)  # [ROWS, block, word, step, half, of pair]
    return tl.reshape(tl.permute(values, (0, 1, 3, 4, 2, 5)), (ROWS, DEPTH))


@triton.jit
def _low_pair(words, scale):
    """Decode nibbles 0 and 4: one product moves magnitude and sign to their places."""
    placed = ((words & 0x000F000F) * 0x1040) & 0x81C081C0
    return bf16_pairs.multiply(placed, scale)


@triton.jit
def _high_pair(words, scale):
    """Decode nibbles 1 and 5."""
    placed = ((words & 0x00F000F0) * 0x104) & 0x81C081C0
    return bf16_pairs.multiply(placed, scale)


@triton.jit
def _tile(tile, expert_ptr, first_ptr, offsets_ptr, experts, SLOTS: tl.constexpr):
    """Return the expert, first slot and end of slots of a tile."""
    expert = tl.load(expert_ptr + tile)
    known = tl.minimum(expert, experts - 1)
    start = tl.load(offsets_ptr + known) + (tile - tl.load(first_ptr + known)) * SLOTS
    return expert, start, tl.load(offsets_ptr + known + 1)


@triton.jit
def _gate_up_kernel(
    x_ptr,
    w1_ptr,
    s1_ptr,
    w3_ptr,
    s3_ptr,
    out_ptr,
    expert_ptr,
    first_ptr,
    offsets_ptr,
    experts,
    INNER: tl.constexpr,
    DEPTH_ALL: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(0) // tl.cdiv(INNER, ROWS // 2)
    expert, start, end = _tile(tile, expert_ptr, first_ptr, offsets_ptr, experts, SLOTS)
    if expert < experts:
        # Half the rows are gates, half ups of the same outputs. The next product wants its columns
        # interleaved: these rows are they.
        HALF: tl.constexpr = ROWS // 2
        r = tl.arange(0, ROWS)
        start_place = tl.program_id(0) % tl.cdiv(INNER, HALF) * HALF
        row = tl.minimum(interleave(start_place + r % HALF), INNER - 1)
        row = expert.to(tl.int64) * INNER + row
        word, block = tl.arange(0, DEPTH // 8), tl.arange(0, DEPTH // 128)
        is_gate = (r < HALF)[:, None]
        w_place = row[:, None] * (DEPTH_ALL // 8) + word[None, :]
        s_place = row[:, None] * (DEPTH_ALL // 128) + block[None, :]
        w_ptrs = tl.where(is_gate, w1_ptr + w_place, w3_ptr + w_place)
        s_ptrs = tl.where(is_gate, s1_ptr + s_place, s3_ptr + s_place)
        slot = start + tl.arange(0, SLOTS)
        live = (slot < end)[None, :]
        x_ptrs = x_ptr + slot.to(tl.int64)[None, :] * DEPTH_ALL + tl.arange(0, DEPTH)[:, None]
        total = tl.zeros((ROWS, SLOTS), tl.float32)
        for _ in range(0, DEPTH_ALL, DEPTH):
            x = tl.load(x_ptrs, mask=live, other=0)
            words = tl.load(w_ptrs).to(tl.uint32, bitcast=True)
            scales = tl.load(s_ptrs).to(tl.uint32, bitcast=True)
            total = dot_bf16(_decode_tile(words, scales, ROWS, DEPTH), x, total)
            x_ptrs += DEPTH
            w_ptrs += DEPTH // 8
            s_ptrs += DEPTH // 128
        total = to_float32(to_bf16(total))
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, SLOTS)), (1, 2, 0)))
        value = to_bf16(situ(gate, up, BETA, LINEAR_BETA))
        place = start_place + tl.arange(0, HALF)
        out_place = slot.to(tl.int64)[None, :] * INNER + place[:, None]
        tl.store(out_ptr + out_place, value, mask=live & (place < INNER)[:, None])


@triton.jit
def _down_kernel(
    x_ptr,
    w2_ptr,
    s2_ptr,
    out_ptr,
    expert_ptr,
    first_ptr,
    offsets_ptr,
    experts,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(0) // tl.cdiv(WIDTH, ROWS)
    expert, start, end = _tile(tile, expert_ptr, first_ptr, offsets_ptr, experts, SLOTS)
    if expert < experts:
        place = tl.program_id(0) % tl.cdiv(WIDTH, ROWS) * ROWS + tl.arange(0, ROWS)
        row = expert.to(tl.int64) * WIDTH + tl.minimum(place, WIDTH - 1)
        word, block = tl.arange(0, DEPTH // 8), tl.arange(0, DEPTH // 128)
        w_place = row[:, None] * (INNER // 8) + word[None, :]
        s_place = row[:, None] * (INNER // 128) + block[None, :]
        slot = start + tl.arange(0, SLOTS)
        live = (slot < end)[None, :]
        x_ptrs = x_ptr + slot.to(tl.int64)[None, :] * INNER + tl.arange(0, DEPTH)[:, None]
        w_ptrs, s_ptrs = w2_ptr + w_place, s2_ptr + s_place
        total = tl.zeros((ROWS, SLOTS), tl.float32)
        for _ in range(0, INNER, DEPTH):
            x = tl.load(x_ptrs, mask=live, other=0)
            words = tl.load(w_ptrs).to(tl.uint32, bitcast=True)
            scales = tl.load(s_ptrs).to(tl.uint32, bitcast=True)
            total = dot_bf16(_decode_tile(words, scales, ROWS, DEPTH), x, total)
            x_ptrs += DEPTH
            w_ptrs += DEPTH // 8
            s_ptrs += DEPTH // 128
        out_place = slot.to(tl.int64)[None, :] * WIDTH + place[:, None]
        tl.store(out_ptr + out_place, to_bf16(total), mask=live & (place < WIDTH)[:, None])
