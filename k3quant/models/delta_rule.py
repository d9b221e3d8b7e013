"""The gated delta rule of KDA: a state that decays per channel and is corrected token by token.

Two forms of one recurrence. `recurrent_delta_rule` is the definition, a token at a time;
`chunked_delta_rule` does the same in matrix products over chunks. The chunked form never divides
by a decay and only takes exponentials of sums of log decays, which are at most zero: no decay,
however strong, overflows it, and nothing cancels.

Legend: B windows, T tokens, H heads, K key channels, V value channels, N chunks, C tokens a chunk,
c tokens a tile, M tiles.
"""

import torch
from torch import Tensor

CHUNK_TOKENS = 64
TILE_TOKENS = 16


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence as it is defined.

    Each token: S = exp(log_decay)[:, None] * S; u = beta (v - k^T S); S = S + k u^T; o = q^T S.

    Args:
        q: `[B, T, H, K]` float32, scaled.
        k: `[B, T, H, K]` float32.
        v: `[B, T, H, V]` float32.
        log_decay: `[B, T, H, K]` float32, at most 0.
        beta: `[B, T, H]` float32.
        state: `[B, H, K, V]` float32; None is zeros.

    Returns:
        Outputs `[B, T, H, V]` and the state after the last token, `[B, H, K, V]`.

    Source: fla, ops/kda/naive.py (naive_recurrent_kda); Kimi Linear report, section 3.
    """
    S = _first_state(k, v, state)
    outputs = torch.empty_like(v)
    for t in range(q.shape[1]):
        S = S * log_decay[:, t].exp()[..., None]
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        update = beta[:, t, :, None] * (v[:, t] - seen)
        S = S + k[:, t, :, :, None] * update[:, :, None, :]
        outputs[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return outputs, S


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in chunks; arguments and results as `recurrent_delta_rule`.

    With D_ts the decay from after token s to token t, the updates of a chunk solve the lower
    triangular system u_t + beta_t sum_{s<t} (k_t D_ts k_s) u_s = beta_t (v_t - k_t D_t0 S), and
    o_t = q_t D_t0 S + sum_{s<=t} (q_t D_ts k_s) u_s.

    Args:
        q: `[B, T, H, K]` float32, scaled.
        k: `[B, T, H, K]` float32.
        v: `[B, T, H, V]` float32.
        log_decay: `[B, T, H, K]` float32, at most 0.
        beta: `[B, T, H]` float32.
        state: `[B, H, K, V]` float32; None is zeros.
        chunk: Tokens a chunk, a multiple of 16. A last chunk that is short is filled up with
            tokens that neither decay nor write.

    Returns:
        Outputs `[B, T, H, V]` and the state after the last token, `[B, H, K, V]`.

    Raises:
        ValueError: `chunk` is no positive multiple of 16.
    """
    if chunk < TILE_TOKENS or chunk % TILE_TOKENS:
        raise ValueError(f"chunk: expected a positive multiple of {TILE_TOKENS}, got {chunk}")
    T = q.shape[1]
    S = _first_state(k, v, state)
    if T == 0:
        return torch.empty_like(v), S
    # A sequence shorter than a chunk needs no more than its own tiles.
    chunk = min(chunk, -(-T // TILE_TOKENS) * TILE_TOKENS)
    q, k, v, log_decay = (_in_chunks(x, chunk) for x in (q, k, v, log_decay))
    beta = _in_chunks(beta[..., None], chunk)
    keys_seen, queries_seen = _decayed_products(q, k, log_decay)
    system = beta * keys_seen  # strictly lower; its unit diagonal is implied
    inverses = _invert_tiles(system)
    since_start = log_decay.cumsum(dim=-2).exp()
    to_end = _sum_after(log_decay).exp()
    outputs = torch.empty_like(v)
    for n in range(q.shape[2]):
        decay = since_start[:, :, n]
        target = beta[:, :, n] * (v[:, :, n] - (k[:, :, n] * decay) @ S)
        update = _solve(system[:, :, n], inverses[:, :, n], target)
        outputs[:, :, n] = (q[:, :, n] * decay) @ S + queries_seen[:, :, n] @ update
        S = S * decay[:, :, -1, :, None] + (k[:, :, n] * to_end[:, :, n]).mT @ update
    return outputs.flatten(2, 3)[:, :, :T].transpose(1, 2), S


def _invert_tiles(system: Tensor) -> Tensor:
    """Invert I + L for the diagonal tiles L of `[B, H, N, C, C]`, `[B, H, N, M, c, c]`.

    Substitution a row at a time: stable where keys repeat, which a product of powers of L is not.
    """
    M = system.shape[-1] // TILE_TOKENS
    tiles = system.reshape(*system.shape[:3], M, TILE_TOKENS, M, TILE_TOKENS)
    lower = torch.stack([tiles[..., i, :, i, :] for i in range(M)], dim=-3)
    inverse = torch.eye(TILE_TOKENS, dtype=system.dtype, device=system.device).repeat(
        *lower.shape[:-2], 1, 1
    )
    for t in range(1, TILE_TOKENS):
        inverse[..., t, :t] = -(lower[..., t, None, :t] @ inverse[..., :t, :t])[..., 0, :]
    return inverse


def _solve(system: Tensor, inverses: Tensor, target: Tensor) -> Tensor:
    """Solve (I + L) u = target for one chunk, `[B, H, C, V]`, a tile of rows after the other."""
    update = target.clone()
    for i in range(inverses.shape[-3]):
        start, stop = i * TILE_TOKENS, (i + 1) * TILE_TOKENS
        rest = target[..., start:stop, :]
        if i:
            rest = rest - system[..., start:stop, :start] @ update[..., :start, :]
        update[..., start:stop, :] = inverses[..., i, :, :] @ rest
    return update


def _first_state(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    if state is not None:
        return state
    B, _, H, K = k.shape
    return k.new_zeros((B, H, K, v.shape[-1]))


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return `[B, H, N, C, X]` from `[B, T, H, X]`, zeros behind the last token."""
    B, T, H, X = x.shape
    N = -(-T // chunk)
    padded = x.new_zeros((B, H, N * chunk, X))
    padded[:, :, :T] = x.transpose(1, 2)
    return padded.reshape(B, H, N, chunk, X)


def _sum_after(log_decay: Tensor) -> Tensor:
    """Sum over the later tokens of a run `[..., C, K]`, by addition only."""
    later = torch.zeros_like(log_decay)
    later[..., :-1, :] = log_decay[..., 1:, :].flip(-2).cumsum(dim=-2).flip(-2)
    return later


def _decayed_products(q: Tensor, k: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return k_t D_ts k_s for s < t and q_t D_ts k_s for s <= t, `[B, H, N, C, C]`, else zeros."""
    B, H, N, C, K = k.shape
    tiles = (B, H, N, C // TILE_TOKENS, TILE_TOKENS, K)
    qt, kt, gt = q.reshape(tiles), k.reshape(tiles), log_decay.reshape(tiles)
    keys_seen = k.new_zeros((B, H, N, C, C))
    queries_seen = torch.zeros_like(keys_seen)
    _fill_diagonal_tiles(qt, kt, gt, keys_seen, queries_seen)
    # Off the diagonal a decay is the product of two: from s to the end of the tiles before t's,
    # and from there to t.
    since_start, to_end = gt.cumsum(dim=-2).exp(), _sum_after(gt).exp()
    whole = gt.sum(dim=-2, keepdim=True).exp()
    earlier = kt[..., :0, 0, :]
    for i in range(1, tiles[3]):
        last = kt[..., i - 1, :, :] * to_end[..., i - 1, :, :]
        earlier = torch.cat((earlier * whole[..., i - 1, :, :], last), dim=-2)
        rows = slice(i * TILE_TOKENS, (i + 1) * TILE_TOKENS)
        columns = slice(0, i * TILE_TOKENS)
        decay = since_start[..., i, :, :]
        keys_seen[..., rows, columns] = (kt[..., i, :, :] * decay) @ earlier.mT
        queries_seen[..., rows, columns] = (qt[..., i, :, :] * decay) @ earlier.mT
    return keys_seen, queries_seen


def _fill_diagonal_tiles(
    qt: Tensor, kt: Tensor, gt: Tensor, keys_seen: Tensor, queries_seen: Tensor
) -> None:
    """Fill the tiles on the diagonal, one row of every tile at a time."""
    decay = gt.exp()
    decayed = kt.clone()  # k_s as token t sees it
    tile_keys = kt.new_zeros((*kt.shape[:-1], TILE_TOKENS))
    tile_queries = torch.zeros_like(tile_keys)
    for t in range(TILE_TOKENS):
        decayed[..., :t, :] *= decay[..., t : t + 1, :]
        seen = decayed[..., : t + 1, :]
        tile_keys[..., t, :t] = (seen[..., :t, :] * kt[..., t : t + 1, :]).sum(dim=-1)
        tile_queries[..., t, : t + 1] = (seen * qt[..., t : t + 1, :]).sum(dim=-1)
    for i in range(kt.shape[3]):
        tile = slice(i * TILE_TOKENS, (i + 1) * TILE_TOKENS)
        keys_seen[..., tile, tile] = tile_keys[..., i, :, :]
        queries_seen[..., tile, tile] = tile_queries[..., i, :, :]
