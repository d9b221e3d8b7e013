"""Any mixture of misbehaviour: no file is ever wrong under its name, and the end is right."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from k3quant.errors import K3QuantError
from k3quant.hub.record import RECORD_FILE
from k3quant.report import Report

Run = Callable[..., Report]

STRAYS = {"copy/model-00001-of-000003.safetensors", "consolidated.00.pth"}


def random_fault(dice: random.Random) -> dict[str, Any]:
    at = dice.randrange(300_000)
    return dice.choice(
        [
            {"cut_at": at},
            {"cut_at": at % 500},
            {"flip_at": at},
            {"short_by": at % 3000},
            {"ignore_range": True},
            {"ignore_range": True, "cut_at": at},
            {"stall_at": at},
            {"status": dice.choice([429, 500, 503, 504])},
            {"status": 429, "headers": {"Retry-After": "0"}},
            {"no_keep_alive": True},
        ]
    )


def wrong_files(out: Path, files: dict[str, bytes]) -> list[str]:
    return [
        path.name
        for path in out.rglob("*")
        if path.is_file()
        and path.suffix not in {".partial", ".lock"}
        and not path.name.endswith((".partial.json", ".partial.json.new", RECORD_FILE))
        and path.read_bytes() != files[path.relative_to(out).as_posix()]
    ]


@pytest.mark.parametrize("seed", range(10))
def test_misbehaviour_of_all_kinds(
    hub: Any, download: Run, out: Path, files: dict[str, bytes], seed: int
) -> None:
    dice = random.Random(seed)
    hub.redirect = dice.choice([None, "same", "other"])
    for _ in range(30):
        where = dice.choice(["/api/", "00001-of", "00002-of", "00003-of", "tiktoken", "index"])
        fault = random_fault(dice)
        if where == "/api/" and "status" not in fault:
            where = "safetensors"
        hub.fault(where, after=dice.randrange(3), times=dice.randrange(1, 3), **fault)
    settings = {"jobs": dice.randrange(1, 7), "piece_bytes": dice.choice([10_000, 65_536, 1 << 20])}
    for _ in range(3):
        with suppress(K3QuantError):
            report = download(**settings, stall_timeout=0.2)
            if report.ok and report.summary["state"] == "complete":
                break
        assert not wrong_files(out, files)
    hub.faults.clear()
    assert download(**settings).summary["state"] == "complete"
    assert not wrong_files(out, files)
    there = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert there == files.keys() - STRAYS | {RECORD_FILE}
