"""`download`: fetch a checkpoint of one commit, prove every byte, go on where it was stopped."""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from k3quant.checkpoint.index import INDEX_FILE
from k3quant.checkpoint.output_file import atomic_write, free_bytes
from k3quant.errors import IncompleteError, ResourceError
from k3quant.hub.client import HubClient
from k3quant.hub.crew import Crew
from k3quant.hub.digest import Mismatch, Proof, judge_bytes
from k3quant.hub.existing import Verdicts, check_present, discard_leftovers, mtime_ns
from k3quant.hub.folder_lock import FolderLock
from k3quant.hub.outcome import mismatch_finding, notes_of, report_check, wrong_sizes
from k3quant.hub.partial import Partial
from k3quant.hub.patience import StoppedError
from k3quant.hub.plan import DownloadPlan, plan_download
from k3quant.hub.record import DownloadRecord, FetchedFile, listed
from k3quant.hub.reference import Reference
from k3quant.hub.settings import DownloadSettings
from k3quant.hub.transfer import FileTransfer
from k3quant.progress import SILENT, Progress
from k3quant.report import Finding, Report, Severity, finding_of


def run_download(
    reference: Reference,
    out: Path,
    settings: DownloadSettings,
    progress: Progress = SILENT,
    *,
    free: Callable[[Path], int] = free_bytes,
) -> Report:
    """Fetch what is missing of a repository, and prove all of it.

    Args:
        reference: The repository and its revision, which is resolved to one commit.
        out: The folder; what it holds of the same commit already is kept.
        settings: What to have, and how.
        progress: Told the bytes that are checked and that arrive.
        free: Tells the free bytes of a folder.

    Returns:
        A report whose errors are files that could not be had, or not as they should be.

    Raises:
        UsageError: There is no such repository, revision or file, or access is denied.
        IncompleteError: The repository lacks files, or the user stopped the download.
        RefusedError: The folder belongs to another repository or commit, or is in use.
        HashError: The manifest and the Hub name different digests.
        StructureError: The index or the folder's record is malformed.
        ResourceError: The server or the disk failed for as long as the settings allow.
    """
    client = settings.client()
    began = time.monotonic()
    try:
        plan = plan_download(reference, out, settings, client=client)
        if settings.verify_only:
            verdicts = check_present(plan, settings, progress, stop=client.stop)
            return report_check(plan, verdicts)
        plan.check_space(free=free)
        with FolderLock(out):
            return _Download(client, plan, settings, progress, began).run()
    except (KeyboardInterrupt, StoppedError) as error:
        raise IncompleteError(
            f"{reference}: expected to finish the download, got a request to stop",
            hint=f"what arrived is kept; go on with `{resume_line(reference, out, settings)}`",
        ) from error
    finally:
        client.close()


def resume_line(reference: Reference, out: Path, settings: DownloadSettings) -> str:
    """Return the command that goes on with a download."""
    place = reference.repository
    if reference.revision != "main":
        place += f"@{reference.revision}"
    words = ["k3quant", "download", place, "--out", str(out)]
    for pattern in settings.include:
        words += ["--include", pattern]
    for option, span in (("--layers", settings.layers), ("--experts", settings.experts)):
        if span is not None:
            words += [option, f"{span[0]}-{span[1]}"]
    return shlex.join(words)


@dataclass(slots=True)
class _Counts:
    """What a run moved."""

    arrived: int = 0
    kept: int = 0
    resumed: int = 0
    fetched: list[str] = field(default_factory=list)


class _Download:
    """One run into a locked folder."""

    def __init__(
        self,
        client: HubClient,
        plan: DownloadPlan,
        settings: DownloadSettings,
        progress: Progress,
        began: float,
    ) -> None:
        self._client = client
        self._plan = plan
        self._settings = settings
        self._progress = progress
        self._began = began
        self._counts = _Counts()
        self._lock = Lock()
        self._findings: list[Finding] = []
        self._record = _record_to_begin(plan, settings)

    def run(self) -> Report:
        plan, out = self._plan, self._plan.out
        verdicts = check_present(plan, self._settings, self._progress, stop=self._client.stop)
        self._keep(verdicts)
        self._record.save(out)
        removed = discard_leftovers(plan, verdicts)
        transfers = self._transfers()
        crew = Crew(self._client, transfers, jobs=self._settings.jobs, landed=self._landed)
        self._progress.start("download", sum(t.content.size for t in transfers), "B")
        for transfer in transfers:
            self._progress.advance(transfer.partial.done_bytes)
        try:
            crew.run()
        except ResourceError as error:
            line = resume_line(plan.listing.reference, out, self._settings)
            error.hint = "; ".join(filter(None, (error.hint, f"go on with `{line}`")))
            raise
        for transfer, fault in crew.failed:
            self._findings.append(
                finding_of(fault, subject=transfer.content.name, code="not-fetched")
            )
        self._write_documents(complete=not crew.failed)
        self._record.save(out)
        return self._report(removed)

    def _keep(self, verdicts: Verdicts) -> None:
        for name, verdict in verdicts.items():
            path = self._plan.out / name
            if isinstance(verdict, Proof):
                self._counts.kept += 1
                self._note_fetched(name, verdict)
                continue
            self._record.fetched.pop(name, None)
            path.unlink(missing_ok=True)
            self._findings.append(mismatch_finding(name, verdict, Severity.WARNING))
        self._findings += wrong_sizes(self._plan, Severity.WARNING)

    def _transfers(self) -> list[FileTransfer]:
        plan, transfers = self._plan, []
        for content in plan.contents:
            if content.name in self._record.fetched:
                continue
            partial = Partial(
                plan.out / content.name,
                content,
                commit=plan.listing.pinned.revision,
                piece_bytes=self._settings.piece_bytes,
            )
            self._counts.resumed += partial.done_bytes
            transfers.append(
                FileTransfer(
                    partial,
                    plan.expected[content.name],
                    told=self._arrived,
                    stop=self._client.stop,
                )
            )
        return transfers

    def _arrived(self, count: int) -> None:
        self._progress.advance(count)
        with self._lock:
            self._counts.arrived += max(count, 0)

    def _landed(self, transfer: FileTransfer) -> None:
        assert transfer.proof is not None
        self._counts.fetched.append(transfer.content.name)
        self._note_fetched(transfer.content.name, transfer.proof)
        self._record.save(self._plan.out)

    def _note_fetched(self, name: str, proof: Proof) -> None:
        changed = mtime_ns(self._plan.out / name)
        self._record.fetched[name] = FetchedFile(proof.sha256, proof.by, changed)

    def _write_documents(self, *, complete: bool) -> None:
        """Write what is written last, the index after everything it names.

        No loader takes a folder without an index for a checkpoint; so it stays away where a shard
        is missing.
        """
        for name, content in self._plan.documents.items():
            if name in self._record.fetched or (name == INDEX_FILE and not complete):
                continue
            verdict = judge_bytes(content, self._plan.expected[name])
            if isinstance(verdict, Mismatch):  # a manifest knows better than git's object id
                self._findings.append(mismatch_finding(name, verdict, Severity.ERROR))
                continue
            atomic_write(self._plan.out / name, content)
            self._counts.fetched.append(name)
            self._counts.arrived += len(content)
            self._note_fetched(name, verdict)

    def _report(self, removed: list[str]) -> Report:
        plan, counts, record = self._plan, self._counts, self._record
        seconds = time.monotonic() - self._began
        self._findings += notes_of(plan, record)
        summary = plan.summary() | {
            "state": record.state,
            "fetched_files": len(counts.fetched),
            "fetched_bytes": counts.arrived,
            "kept_files": counts.kept,
            "resumed_bytes": counts.resumed,
            "removed_partials": len(removed),
            "lost_connections": plan.reader.num_faults,
            "seconds": round(seconds, 3),
            "bytes_per_second": round(counts.arrived / seconds) if seconds else 0,
        }
        return Report(command="download", findings=tuple(self._findings), summary=summary)


def _record_to_begin(plan: DownloadPlan, settings: DownloadSettings) -> DownloadRecord:
    """Return the record of the plan, with what an older one says and is still true."""
    pinned = plan.listing.pinned
    record = DownloadRecord(
        repository=pinned.repository,
        revision=plan.listing.reference.revision,
        commit=pinned.revision,
        include=settings.include,
        cut=settings.cut_label,
        whole=plan.whole,
        wanted=plan.wanted,
        fetched={},
    )
    old = plan.record
    if old is None:
        return record
    if not record.whole and old.commit == record.commit:
        record.whole = old.whole
    known = old.whole | old.wanted
    now = listed(plan.listing.files.values())
    for name, entry in old.fetched.items():
        same_bytes = name in known and known[name] == now.get(name)
        if same_bytes and name not in plan.wanted and (plan.out / name).exists():
            record.fetched[name] = entry
    return record
