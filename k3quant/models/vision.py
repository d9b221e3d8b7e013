"""MoonViT-V2 and its projector: from patches to rows of the language model's embedding.

A picture, or a chunk of a video, is one segment: its patches attend to each other and to nothing
else. No score matrix ever exists, and wide intermediates are made a block of patches at a time.

Legend: n patches of a segment, W tower width, H heads, d head width, D hidden.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from k3quant.models.k3_config import VisionConfig
from k3quant.models.norms import rms_norm
from k3quant.models.rows import in_row_blocks
from k3quant.models.tap import Tap
from k3quant.models.vision_grid import Grid
from k3quant.models.vision_positions import Rotary, position_embedding, rotate

# The tower's norms are given no epsilon; what they then use is float32's, whatever the weights are.
VISION_NORM_EPS = torch.finfo(torch.float32).eps

# All three go over the keys block by block, the fastest first; the plain one, which is left out,
# would write all scores down.
_STREAMING = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
_GPU_ROWS = 16  # times as many a block as on a CPU: on a GPU it is the many launches that cost


def embed_patches(pixels: Tensor, grid: Grid, weights: Mapping[str, Tensor]) -> Tensor:
    """Project patches and add their positions.

    Args:
        pixels: `[n, 3, patch, patch]` normalised, frames, then rows, then columns.
        grid: The patches, as `check_grid` accepts them.
        weights: `vision.patch_embed` and `vision.pos_emb`; the first one's dtype and device are
            the result's.

    Returns:
        `[n, W]`.

    Raises:
        ValueError: Another number of patches than the grid's.

    Source: Kimi-K3 modelling code, MoonVision3dPatchEmbed.
    """
    if len(pixels) != grid.num_patches:
        raise ValueError(f"pixels: expected {grid.num_patches} patches, got {len(pixels)}")
    kernel = weights["vision.patch_embed"]
    x = linear(pixels.to(kernel).flatten(1), kernel.flatten(1))
    return x + position_embedding(weights["vision.pos_emb"], grid).to(x)


def vision_block(
    x: Tensor, weights: Mapping[str, Tensor], rotary: Rotary, vision: VisionConfig
) -> Tensor:
    """Run one block of the tower over one segment.

    Args:
        x: `[n, W]`.
        weights: By role: `vision.wqkv`, `vision.wo`, `vision.norm0` and the like.
        rotary: Rotation of the segment's patches.
        vision: The config.

    Returns:
        `[n, W]`, in the dtype of `x`.

    Source: Kimi-K3 modelling code, MoonViTEncoderLayer.
    """
    q, k, v = _queries_keys_values(x, weights, rotary, vision)
    with sdpa_kernel(_STREAMING, set_priority=True):
        attended = scaled_dot_product_attention(q[None], k[None], v[None])[0]
    del q, k, v
    x = x + linear(attended.transpose(0, 1).flatten(1), weights["vision.wo"])
    del attended

    def mlp(rows: Tensor) -> Tensor:
        normed = rms_norm(rows, weights["vision.norm1"], eps=VISION_NORM_EPS)
        inner = gelu(linear(normed, weights["vision.mlp.fc0"]), approximate="tanh")
        return rows + linear(inner, weights["vision.mlp.fc1"])

    return in_row_blocks(mlp, (x,), width=_width(vision.intermediate_size, x))


def merge_patches(x: Tensor, grid: Grid, vision: VisionConfig, *, tap: Tap | None = None) -> Tensor:
    """Average the frames and lay neighbouring patches side by side.

    Args:
        x: `[n, W]` after the final norm.
        grid: The patches.
        vision: The config.
        tap: Receives `tower_out`, `[n / t / 4, 4, W]`.

    Returns:
        `[n / t / 4, 4 W]`: the upper two of 2 x 2 patches, then the lower two.

    Source: Kimi-K3 modelling code, tpool_patch_merger.
    """
    rows, columns = vision.merge_kernel_size
    frames = x.reshape(grid.t, grid.h // rows, rows, grid.w // columns, columns, -1)
    pooled = frames.float().mean(dim=0).to(x) if grid.t > 1 else frames[0]
    merged = pooled.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    if tap is not None:
        tap("tower_out", merged)
    return merged.flatten(1)


def finish_tower(
    x: Tensor,
    grid: Grid,
    weights: Mapping[str, Tensor],
    vision: VisionConfig,
    *,
    tap: Tap | None = None,
) -> Tensor:
    """Run what follows the blocks: final norm, merge, projector.

    Args:
        x: `[n, W]` after the last block.
        grid: The patches.
        weights: `vision.final_norm`, `projector.in`, `projector.out`, `projector.norm`.
        vision: The config.
        tap: Receives `final_norm`, `tower_out` and `projector_out`.

    Returns:
        `[tokens, D]`, one row a token of the language model.

    Source: Kimi-K3 modelling code, PatchMergerMLPV2.
    """
    normed = rms_norm(x, weights["vision.final_norm"], eps=VISION_NORM_EPS)
    if tap is not None:
        tap("final_norm", normed)
    merged = merge_patches(normed, grid, vision, tap=tap)

    def project(rows: Tensor) -> Tensor:
        inner = gelu(linear(rows, weights["projector.in"]))
        out = linear(inner, weights["projector.out"])
        return rms_norm(out, weights["projector.norm"], eps=vision.projector_ln_eps)

    width = 2 * weights["projector.out"].shape[0]
    features = in_row_blocks(project, (merged,), width=_width(width, x))
    if tap is not None:
        tap("projector_out", features)
    return features


def _queries_keys_values(
    x: Tensor, weights: Mapping[str, Tensor], rotary: Rotary, vision: VisionConfig
) -> Tensor:
    """Return rotated queries, rotated keys and values, `[3, H, n, d]`."""
    H = vision.num_attention_heads

    def project(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = rms_norm(rows, weights["vision.norm0"], eps=VISION_NORM_EPS)
        qkv = linear(normed, weights["vision.wqkv"]).reshape(len(rows), 3, H, -1)
        qkv[:, :2] = rotate(qkv[:, :2], cos[:, None, None], sin[:, None, None])
        return qkv.flatten(1)

    qkv = in_row_blocks(project, (x, *rotary), width=_width(3 * vision.qkv_hidden_size, x))
    return qkv.reshape(len(x), 3, H, -1).permute(1, 2, 0, 3)


def _width(elements: int, x: Tensor) -> int:
    return elements // _GPU_ROWS if x.is_cuda else elements
