from pathlib import Path

import pytest

from k3quant.checkpoint.reader import open_checkpoint
from k3quant.convert import estimate as module
from k3quant.convert.estimate import estimate
from k3quant.convert.plan import plan_export
from k3quant.convert.recipe import recipe_for
from k3quant.formats.mx import ScaleRounding


def test_estimate_comes_from_running_units_and_leaves_nothing(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_HASH_BYTES", 1 << 20)
    rules = recipe_for(
        "int4", scheme="compressed-tensors", rounding=ScaleRounding.EVEN, group_size=32
    )
    checkpoint = open_checkpoint(nano)
    plan = plan_export(checkpoint, rules)
    found = estimate(checkpoint, plan, tmp_path / "a" / "b", jobs=64, hash_source=True)
    assert found.jobs == len(plan.files)
    assert found.processor_seconds > 0
    target = sum(file.file_bytes for file in plan.files)
    assert found.disk_seconds == pytest.approx(target / found.disk_bytes_per_second)
    assert found.seconds == max(found.processor_seconds, found.disk_seconds)
    assert list(tmp_path.iterdir()) == []
