"""Files that lie in the folder already: which are what they must be, which are leftovers."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

from k3quant.checkpoint.output_file import PARTIAL_SUFFIX
from k3quant.hub.digest import Expected, Mismatch, Proof, hash_file
from k3quant.hub.partial import STATE_SUFFIX, discard, partial_path
from k3quant.hub.plan import DownloadPlan
from k3quant.hub.record import PARTIAL
from k3quant.hub.settings import DownloadSettings
from k3quant.progress import Progress

_HF_CACHE = Path(".cache", "huggingface", "download")
_HF_SUFFIX = ".incomplete"

Verdicts = Mapping[str, Proof | Mismatch]


def check_present(
    plan: DownloadPlan, settings: DownloadSettings, progress: Progress, *, stop: Event
) -> Verdicts:
    """Hash the wanted files that have the right size.

    While a download is under way, a file that it proved itself and that has not changed since is
    taken at its record's word; once it has ended, running it again checks everything.

    Args:
        plan: What is wanted and what is there.
        settings: Whether to hash what a record proves.
        progress: Told the bytes read.
        stop: Ends the work early.

    Raises:
        ResourceError: The system refused a read.
        StoppedError: The work was told to stop.
    """
    trusted: dict[str, Proof] = {}
    if not settings.rehash and not settings.verify_only:
        trusted = _proved_by_record(plan)
    names = sorted(plan.present - trusted.keys())
    checked = hash_files(
        plan.out, {name: plan.expected[name] for name in names}, progress, stop=stop
    )
    return {**trusted, **checked}


def hash_files(
    folder: Path, expected: Mapping[str, Expected], progress: Progress, *, stop: Event
) -> Verdicts:
    """Hash files of the right size, as many at once as there are processors.

    Args:
        folder: Where they lie.
        expected: What each must be, by name.
        progress: Told the bytes read.
        stop: Ends the work early.

    Raises:
        IncompleteError: A file is gone.
        ResourceError: The system refused a read.
        StoppedError: The work was told to stop.
    """
    progress.start("check", sum(e.size for e in expected.values()), "B")
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    def check(name: str) -> Proof | Mismatch:
        return hash_file(folder / name, expected[name], stop=stop, told=progress.advance)

    pool = ThreadPoolExecutor(jobs or 1, thread_name_prefix="check")
    try:
        return dict(zip(expected, pool.map(check, expected), strict=True))
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _proved_by_record(plan: DownloadPlan) -> dict[str, Proof]:
    record = plan.record
    if record is None or record.state != PARTIAL:
        return {}
    proved: dict[str, Proof] = {}
    for name in plan.present & record.fetched.keys() & record.wanted.keys():
        entry, expected = record.fetched[name], plan.expected[name]
        same_bytes = record.wanted[name] == plan.wanted[name]
        same_digest = expected.sha256 in {None, entry.sha256}
        if same_bytes and same_digest and entry.mtime_ns == mtime_ns(plan.out / name):
            proved[name] = Proof(entry.sha256, entry.proof)
    return proved


def mtime_ns(path: Path) -> int:
    """Return a file's time of change, 0 where it cannot be told."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def discard_leftovers(plan: DownloadPlan, verdicts: Verdicts) -> list[str]:
    """Remove what was begun of files that are whole, or that the repository no longer has.

    Args:
        plan: What is wanted.
        verdicts: The files that are there.

    Returns:
        The names of what was removed.
    """
    removed: list[str] = []
    for name, verdict in verdicts.items():
        if isinstance(verdict, Proof) and partial_path(plan.out / name).exists():
            removed.append(name)
    for state in sorted(plan.out.rglob(f"*{PARTIAL_SUFFIX}{STATE_SUFFIX}")):
        path = state.with_name(state.name.removesuffix(PARTIAL_SUFFIX + STATE_SUFFIX))
        name = path.relative_to(plan.out).as_posix()
        if name not in plan.wanted and name not in plan.listing.files:
            removed.append(name)
    for name in removed:
        discard(plan.out / name)
    return removed


def foreign_partials(folder: Path) -> dict[str, int]:
    """Return what huggingface_hub left unfinished below a folder: sizes by path."""
    found: dict[str, int] = {}
    for path in sorted((folder / _HF_CACHE).rglob(f"*{_HF_SUFFIX}")):
        with suppress(OSError):
            found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found
