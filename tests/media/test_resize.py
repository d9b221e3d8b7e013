import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3quant.media.resize import plan_resize
from k3quant.media.settings import MediaSettings

SETTINGS = MediaSettings(
    patch_size=14,
    merge_kernel_size=2,
    in_patch_limit=65536,
    patch_limit_on_one_side=512,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    background=None,
    video=None,
)


@pytest.mark.parametrize("name", ["rgb_70x45", "rgb_200x150", "rgba_50x61"])
def test_sizes_equal_the_vendors(golden_folder, settings, name):
    golden = json.loads((golden_folder / "summary.json").read_text())["image_processor"][name]
    width, height = map(int, name.split("_")[1].split("x"))
    plan = plan_resize(width, height, settings, in_patch_limit=settings.in_patch_limit)
    grid = plan.grid(settings)
    assert (plan.size, plan.pad_width, plan.pad_height, grid.h * grid.w // 4) == (
        (golden["new_width"], golden["new_height"]),
        golden["pad_width"],
        golden["pad_height"],
        golden["num_tokens"],
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param((1792, 1792), (1, 128, 128), id="fits"),
        pytest.param((7168, 7168), (1, 256, 256), id="too-many-patches"),
        pytest.param((20_000, 10), (1, 2, 512), id="too-long"),
        pytest.param((10, 1_000_000), (1, 512, 2), id="a-line"),
        pytest.param((1, 2), (1, 2, 2), id="tiny"),
    ],
)
def test_released_limits_give_these_grids(size, expected):
    plan = plan_resize(*size, SETTINGS, in_patch_limit=SETTINGS.in_patch_limit)
    assert tuple(plan.grid(SETTINGS)) == expected


@given(st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 70_000))
def test_limits_hold_and_nothing_grows(width, height, limit):
    plan = plan_resize(width, height, SETTINGS, in_patch_limit=limit)
    grid = plan.grid(SETTINGS)
    assert 1 <= plan.new_width <= width
    assert 1 <= plan.new_height <= height
    assert 2 <= max(grid.h, grid.w) <= 512
    assert grid.h % 2 == grid.w % 2 == 0
    assert max(plan.pad_width, plan.pad_height) < 28
    if min(plan.size) > 1:  # the shape is kept, but for less than a pixel a side
        assert abs(plan.new_width * height - plan.new_height * width) <= max(width, height)


def test_the_limit_of_a_side_follows_the_settings():
    narrow = replace(SETTINGS, patch_limit_on_one_side=4)
    assert plan_resize(560, 28, narrow, in_patch_limit=65536).size == (56, 2)
