import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.errors import ExitCode, SchemaError
from k3quant.eval.media_weights import VisionWeights
from k3quant.models import rows
from k3quant.models.k3_config import read_config
from k3quant.models.vision import embed_patches, finish_tower, merge_patches, vision_block
from k3quant.models.vision_grid import Grid, check_grid
from k3quant.models.vision_positions import position_embedding, rotary_of, rotate

# Two float32 runs of one tower differ by up to 7e-6 where values reach 8.
ATOL = 2e-5
CPU = torch.device("cpu")
_media = pytest.mark.parametrize("name", ["image_4x6", "image_8x8_native", "video_3x4x4"])


@pytest.fixture(scope="module")
def goldens(data):
    return load_file(data / "oracle" / "golden" / "vision.safetensors")


@pytest.fixture(scope="module")
def vision(oracle):
    return read_config(open_checkpoint(oracle).config).vision


@pytest.fixture(scope="module")
def units(oracle):
    checkpoint = open_checkpoint(oracle)
    config = read_config(checkpoint.config)
    return list(VisionWeights(checkpoint, config, dtype=torch.float32, device=CPU).walk())


def _run(pixels, grid, units, vision, *, device=CPU, dtype=torch.float32):
    """Return every intermediate of the tower by its golden's name."""
    first, *blocks, last = (
        {role: weight.to(device, dtype) for role, weight in unit.items()} for unit in units
    )
    seen = {"patch_embed": embed_patches(pixels.to(device), grid, first)}
    rotary = rotary_of(grid, vision.qkv_hidden_size // vision.num_attention_heads, device=device)
    x = seen["patch_embed"]
    for number, weights in enumerate(blocks):
        x = seen[f"block{number}"] = vision_block(x, weights, rotary, vision)
    finish_tower(x, grid, last, vision, tap=seen.__setitem__)
    return seen


@_media
def test_every_intermediate_equals_the_golden(goldens, units, vision, name):
    grid = Grid(*goldens[f"{name}.grid_thw"].tolist())
    seen = _run(goldens[f"{name}.pixel_values"], grid, units, vision)
    assert seen.keys() == {
        "patch_embed", "block0", "block1", "final_norm", "tower_out", "projector_out",
    }  # fmt: skip
    for key, value in seen.items():
        torch.testing.assert_close(value, goldens[f"{name}.{key}"], rtol=0, atol=ATOL)


def test_blocks_of_rows_equal_the_whole(goldens, units, vision, monkeypatch):
    name = "video_3x4x4"
    monkeypatch.setattr(rows, "MIN_ROWS", 5)
    monkeypatch.setattr(rows, "ROW_BLOCK_ELEMENTS", 1)
    grid = Grid(*goldens[f"{name}.grid_thw"].tolist())
    seen = _run(goldens[f"{name}.pixel_values"], grid, units, vision)
    torch.testing.assert_close(
        seen["projector_out"], goldens[f"{name}.projector_out"], rtol=0, atol=ATOL
    )


@_media
def test_the_golden_tolerance_sees_a_swap_of_rows_and_columns(goldens, units, vision, name):
    t, h, w = goldens[f"{name}.grid_thw"].tolist()
    grid = Grid(t, h, w)
    x = goldens[f"{name}.patch_embed"]
    head_dim = vision.qkv_hidden_size // vision.num_attention_heads
    rotary = rotary_of(grid, head_dim, device=CPU)
    swapped = type(rotary)(*(table.unflatten(1, (-1, 2)).flip(2).flatten(1) for table in rotary))
    wrong = vision_block(x, units[1], swapped, vision)
    assert (wrong - goldens[f"{name}.block0"]).abs().max() > 100 * ATOL


def test_patches_of_one_frame_get_no_time_term_and_a_native_grid_is_not_resized():
    table = torch.randn(8, 6, 4)
    assert torch.equal(position_embedding(table, Grid(1, 8, 6)), table.flatten(0, 1))
    two = position_embedding(table, Grid(2, 8, 6))
    zero = torch.tensor([0.0, 0, 1, 1])  # sines, then cosines, of nothing
    torch.testing.assert_close(two[:48], table.flatten(0, 1) + zero)


def test_rotation_turns_even_pairs_with_the_column_and_odd_ones_with_the_row():
    rotary = rotary_of(Grid(1, 2, 4), 8, device=CPU)
    at_row_1_column_3 = 1 * 4 + 3
    x = torch.tensor([[1.0, 0, 1, 0, 1, 0, 1, 0]])
    out = rotate(x, rotary.cos[[at_row_1_column_3]], rotary.sin[[at_row_1_column_3]])
    angles = torch.tensor([3.0, 1.0, 3.0 * 10_000**-0.5, 1.0 * 10_000**-0.5])
    expected = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten()
    torch.testing.assert_close(out[0], expected)


def test_four_neighbours_lie_side_by_side_and_frames_are_averaged(vision):
    x = torch.arange(2 * 16, dtype=torch.float32)[:, None]  # 2 frames of 4 x 4 patches, W = 1
    merged = merge_patches(x, Grid(2, 4, 4), vision)
    upper_left = torch.tensor([0.0, 1, 4, 5]) + 16 / 2
    assert torch.equal(merged, upper_left + torch.tensor([[0.0], [2], [8], [10]]))


def test_the_towers_norms_add_the_epsilon_of_float32(units, vision):
    seen = {}
    last = units[-1] | {"vision.final_norm": torch.ones(vision.hidden_size)}
    tiny = torch.full((4, vision.hidden_size), 1e-4)
    finish_tower(tiny, Grid(1, 2, 2), last, vision, tap=seen.__setitem__)
    expected = 1e-4 / (1e-8 + 2.0**-23) ** 0.5
    torch.testing.assert_close(seen["final_norm"], torch.full_like(tiny, expected))


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        pytest.param(Grid(5, 2, 2), "expected 1 to 4 frames in a chunk, got 5", id="five-frames"),
        pytest.param(Grid(0, 2, 2), "expected 1 to 4 frames in a chunk, got 0", id="no-frame"),
        pytest.param(Grid(1, 3, 2), "expected rows in whole groups of 2, got 3", id="odd-rows"),
        pytest.param(Grid(1, 2, 0), "expected columns in whole groups of 2, got 0", id="empty"),
    ],
)
def test_grids_that_do_not_fit_the_tower_are_refused(vision, grid, said):
    with pytest.raises(SchemaError, match=said) as caught:
        check_grid(grid, vision)
    assert caught.value.exit_code is ExitCode.SCHEMA
    check_grid(Grid(4, 2, 2), vision)


def test_pixels_of_another_grid_are_an_error(goldens, units):
    with pytest.raises(ValueError, match="expected 4 patches, got 24"):
        embed_patches(goldens["image_4x6.pixel_values"], Grid(1, 2, 2), units[0])


MEMORY_CODE = """
import resource
from pathlib import Path
import torch
torch.set_num_threads(1)
from k3quant.models.k3_config import VisionConfig
from k3quant.models.vision import vision_block
from k3quant.models.vision_grid import Grid
from k3quant.models.vision_positions import rotary_of

W, H, d, side = 32, 4, 8, 96
vision = VisionConfig(
    num_hidden_layers=1, hidden_size=W, num_attention_heads=H, intermediate_size=64,
    qkv_hidden_size=H * d, patch_size=14, merge_kernel_size=(2, 2), init_pos_emb_height=8,
    init_pos_emb_width=8, init_pos_emb_time=4, projector_ln_eps=1e-5,
)
shapes = {"wqkv": (3 * H * d, W), "wo": (W, H * d), "mlp.fc0": (64, W), "mlp.fc1": (W, 64),
          "norm0": (W,), "norm1": (W,)}
weights = {f"vision.{name}": torch.randn(shape) for name, shape in shapes.items()}

def run(side):
    grid = Grid(1, side, side)
    vision_block(torch.randn(side**2, W), weights, rotary_of(grid, d, device=torch.device("cpu")),
                 vision)
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split("kB")[0]) * 1024

before = run(8)
print(run(side) - before, H * side**4 * 4)
"""


def test_a_block_never_holds_its_scores():
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_CODE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown, scores = map(int, done.stdout.split())
    assert scores > 1 << 30
    assert grown < scores / 10  # one head's share would be a quarter


@pytest.mark.gpu
@_media
@pytest.mark.parametrize(
    ("dtype", "bound"), [pytest.param(torch.float32, 1e-3, id="float32"),
                         pytest.param(torch.bfloat16, 0.05, id="bfloat16")]
)  # fmt: skip
def test_the_tower_runs_on_a_gpu(goldens, units, vision, name, dtype, bound):
    grid = Grid(*goldens[f"{name}.grid_thw"].tolist())
    device = torch.device("cuda")
    seen = _run(
        goldens[f"{name}.pixel_values"], grid, units, vision, device=device, dtype=dtype
    )["projector_out"]  # fmt: skip
    assert seen.dtype is dtype
    golden = goldens[f"{name}.projector_out"]
    # bfloat16 rounds every activation to 8 bits; the error of the whole is a few of those.
    assert (seen.float().cpu() - golden).norm() < bound * golden.norm()
