import importlib
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from k3quant.formats.jit import compiled, frozen, over_runs

TORCH_FREE = [
    "cast_counts",
    "dtypes",
    "error_sums",
    "fast_bf16_fp8",
    "fast_fp8",
    "fast_gguf",
    "fast_int4",
    "fast_int8",
    "fast_int_cast",
    "fast_int_round",
    "fast_mxfp4",
    "fast_nvfp4",
    "fast_stats",
    "faults",
    "int_grid",
    "jit",
    "mx",
    "nvfp4_exponent",
    "octaves",
]


@pytest.mark.parametrize(
    ("runs", "threads", "expected"),
    [
        (0, 4, [(0, 0)]),
        (10, 1, [(0, 10)]),
        (10, 4, [(0, 10)]),
        (25, 4, [(0, 12), (12, 25)]),
        (100, 4, [(0, 25), (25, 50), (50, 75), (75, 100)]),
    ],
    ids=["empty", "one-thread", "too-small-to-split", "uneven", "even"],
)
def test_ranges_cover_all_runs_in_order(runs, threads, expected):
    assert over_runs(lambda a, b: (a, b), runs, threads, least=10) == expected


def test_ranges_run_on_threads_of_their_own_at_once():
    meeting = threading.Barrier(3, timeout=10)

    def work(start: int, stop: int) -> str:
        meeting.wait()
        return threading.current_thread().name

    assert len(set(over_runs(work, 300, 3, least=100))) == 3


def test_a_fault_in_a_thread_reaches_the_caller():
    def work(start: int, stop: int) -> None:
        if start:
            raise OSError("from the second range")

    with pytest.raises(OSError, match="second range"):
        over_runs(work, 200, 2, least=100)


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        over_runs(lambda a, b: None, 1, 0)


def test_frozen_views_share_memory_and_cannot_be_written():
    array = np.zeros(4, np.uint8)
    view = frozen(array, "x")
    array[1] = 7
    assert view[1] == 7
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_frozen_refuses_strides():
    with pytest.raises(ValueError, match="weight: expected a contiguous array"):
        frozen(np.zeros((4, 4), np.uint8)[:, ::2], "weight")


def add_one(values: np.ndarray) -> None:
    for i in range(len(values)):
        values[i] += 1


def test_compiled_is_compiled_once_and_works():
    values = np.zeros(3)
    compiled(add_one)(values)
    assert values.tolist() == [1, 1, 1]
    assert compiled(add_one) is compiled(add_one)
    assert hasattr(compiled(add_one), "inspect_asm")


def test_compiled_works_where_no_cache_can_be_written(tmp_path: Path):
    module = tmp_path / "kernel_module.py"
    module.write_text("def twice(x):\n    return x + x\n")
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import numba.core.caching as caching
        caching.CacheImpl._locator_classes = []
        import kernel_module
        from k3quant.formats.jit import compiled
        assert compiled(kernel_module.twice)(21) == 42
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_imports_neither_torch_nor_numba(module):
    code = (
        f"import sys, k3quant.formats.{module};"
        "assert not {'torch', 'numba'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_list_of_torch_free_modules_is_whole():
    folder = Path(str(importlib.import_module("k3quant.formats").__file__)).parent
    texts = {path.stem: path.read_text() for path in folder.glob("*.py") if path.stem[0] != "_"}
    importing = {name for name, text in texts.items() if "\nimport torch" in text}
    assert importing | set(TORCH_FREE) >= set(texts)
    assert not importing & set(TORCH_FREE)
