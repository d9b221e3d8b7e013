from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from k3quant.errors import IncompleteError, SchemaError
from k3quant.media.media import plan_picture, plan_video, sample_frames, timestamp


def _reds(segment):
    """Return each frame's red level, from its first pixel."""
    frames = segment.pixels().reshape(segment.grid.t, -1, 3, 14, 14)
    return [round(float(level + 1) * 127.5) for level in frames[:, 0, 0, 0, 0]]


def test_a_picture_is_one_segment_captioned_with_its_own_size(golden_folder, settings):
    (segment,) = plan_picture(golden_folder / "rgb_200x150.png", settings)
    assert (segment.stamp, segment.caption) == ("", "image 200x150")
    assert segment.pixels().shape == (segment.grid.num_patches, 3, 14, 14)


def test_an_animation_is_no_picture(tmp_path, settings):
    path = tmp_path / "moving.webp"
    frames = [Image.new("RGB", (8, 8), (n, n, n)) for n in (0, 99)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.raises(SchemaError, match="got an animation of 2 frames"):
        plan_picture(path, settings)


def test_a_folder_becomes_chunks_of_four_with_the_time_of_each(with_video, write_frames):
    segments = plan_video(write_frames(11), with_video, fps=8)
    assert [segment.grid.t for segment in segments] == [4, 4, 3]
    assert [segment.stamp for segment in segments] == [
        "00:00:00.000", "00:00:00.500", "00:00:01.000",
    ]  # fmt: skip
    assert {segment.caption for segment in segments} == {"video"}
    # f10 comes after f9 and not after f1.
    assert [_reds(s) for s in segments] == [[0, 20, 40, 60], [80, 100, 120, 140], [160, 180, 200]]


@pytest.mark.parametrize("order", ["once", "backwards", "twice"])
def test_a_gif_says_its_own_rate_and_is_read_in_any_order(with_video, write_gif, order):
    segments = plan_video(write_gif(6), with_video)
    assert [s.stamp for s in segments] == ["00:00:00.000", "00:00:00.500"]
    expected = [[0, 20, 40, 80], [100]]
    if order == "backwards":
        segments, expected = segments[::-1], expected[::-1]
    if order == "twice":
        segments, expected = segments * 2, expected * 2
    for segment, reds in zip(segments, expected, strict=True):
        assert np.abs(np.subtract(_reds(segment), reds)).max() <= 1


@pytest.mark.parametrize(
    ("count", "fps", "limits", "expected"),
    [
        pytest.param(24, 24.0, {}, [0, 3, 7, 10, 13, 16, 20, 23], id="three-of-one"),
        pytest.param(5, 2.0, {}, [0, 1, 2, 3, 4], id="slower-than-sampled"),
        pytest.param(1, 30.0, {}, [0], id="single"),
        pytest.param(90, 30.0, {"max_num_frames_each_video": 3}, [0, 44, 89], id="at-most"),
    ],
)
def test_frames_are_sampled_evenly_from_first_to_last(with_video, count, fps, limits, expected):
    assert sample_frames(count, fps, replace(with_video.video, **limits)) == expected


def test_all_frames_share_the_patches_of_a_video(with_video, write_frames):
    video = replace(with_video.video, in_patch_limit_video=96)
    folder = write_frames(8, size=(140, 140))
    (first, _) = plan_video(folder, replace(with_video, video=video), fps=8)
    assert tuple(first.grid) == (4, 4, 4)  # 12 patches a frame
    (first, _) = plan_video(folder, with_video, fps=8)
    assert tuple(first.grid) == (4, 8, 8)  # 48


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "00:00:00.000"), (3661.5, "01:01:01.500"), (59.9999, "00:00:59.999")],
)
def test_times_are_cut_to_milliseconds(seconds, said):
    assert timestamp(seconds) == said


def test_a_checkpoint_without_video_settings_refuses_videos(settings, write_frames):
    with pytest.raises(SchemaError, match="expected a checkpoint that samples videos"):
        plan_video(write_frames(2), settings, fps=8)


@pytest.mark.parametrize("fps", [0, -1.0, float("nan")])
def test_a_rate_that_is_not_positive_is_refused(with_video, write_frames, fps):
    with pytest.raises(SchemaError, match="expected a positive fps"):
        plan_video(write_frames(2), with_video, fps=fps)


def test_a_folder_needs_a_rate(with_video, write_frames):
    with pytest.raises(SchemaError, match="expected frames a second") as caught:
        plan_video(write_frames(2), with_video)
    assert '"fps"' in caught.value.hint


def test_a_gif_that_hides_its_rate_needs_one(with_video, write_gif):
    with pytest.raises(SchemaError, match="how long they are shown, got none at frame 0"):
        plan_video(write_gif(3, milliseconds=0), with_video)


def test_a_video_of_a_day_is_refused(with_video, write_frames):
    with pytest.raises(SchemaError, match="expected a video of under a day"):
        plan_video(write_frames(2), with_video, fps=1e-5)


def test_an_empty_folder_and_other_files_are_refused(with_video, tmp_path):
    with pytest.raises(IncompleteError, match="got an empty one"):
        plan_video(tmp_path, with_video, fps=8)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(SchemaError, match=r"got notes\.txt"):
        plan_video(tmp_path, with_video, fps=8)


def test_frames_of_another_size_are_refused_when_they_are_read(with_video, write_frames):
    folder = write_frames(3)
    Image.new("RGB", (30, 28)).save(folder / "f1.png")
    (segment,) = plan_video(folder, with_video, fps=8)
    with pytest.raises(SchemaError, match=r"f1\.png: expected the first frame's size 28 x 28"):
        segment.pixels()
