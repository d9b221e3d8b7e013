"""Converting a checkpoint that is still on the Hub, on a disk that need not hold it.

Shards are downloaded, proven, converted and removed in turn, while the next ones arrive. All of it
is of one commit: the first run writes it down, and every later run goes on with it.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3quant.checkpoint.journal import read_journal
from k3quant.checkpoint.output_file import free_bytes
from k3quant.checkpoint.reader import Checkpoint, open_checkpoint
from k3quant.convert.arrival import ArrivalPlan, plan_arrival
from k3quant.convert.arriving import Arriving
from k3quant.convert.arriving_source import ArrivingSource
from k3quant.convert.export_plan import ExportPlan
from k3quant.convert.run import ConvertResult, ConvertSettings, run_convert
from k3quant.hub.client import HubClient
from k3quant.hub.plan import DownloadPlan, plan_download
from k3quant.hub.reference import Reference
from k3quant.hub.settings import DownloadSettings
from k3quant.hub.source import HubSource
from k3quant.progress import SILENT, Progress

SOURCE_FOLDER = ".k3quant-source"
"""Where shards lie while they are needed, below the output folder."""

_PARAMETER = "source"


@dataclass(frozen=True, kw_only=True)
class HubCheckpoint:
    """A checkpoint on the Hub that is to be converted.

    Attributes:
        reference: What was asked for.
        client: The endpoint; whoever opened the checkpoint closes it.
        settings: How to download.
        download: What a download of it would fetch.
        source: Its files.
        checkpoint: The checkpoint, of which so far headers and small files can be read.
    """

    reference: Reference
    client: HubClient
    settings: DownloadSettings
    download: DownloadPlan
    source: ArrivingSource
    checkpoint: Checkpoint

    @property
    def commit(self) -> str:
        """The commit that the reference stands for."""
        return self.download.listing.pinned.revision

    def identity(self) -> Mapping[str, str]:
        """Return what names the source in the job record of an export."""
        return {
            "repository": self.reference.repository,
            "revision": self.reference.revision,
            "commit": self.commit,
        }


def open_from_hub(reference: Reference, out: Path, settings: DownloadSettings) -> HubCheckpoint:
    """Resolve a checkpoint on the Hub, as an earlier run did if there was one; read its headers.

    Args:
        reference: The repository and its revision.
        out: Output folder of the conversion.
        settings: How to download; it says nothing of subsets.

    Raises:
        UsageError: There is no such repository or revision, or access is denied.
        IncompleteError: The repository lacks shards, its index or its config.
        HashError: The manifest and the Hub name different digests.
        StructureError: A header, the index or the journal is malformed.
        SchemaError: The config is no object.
        ResourceError: The server failed for as long as the policy allows.
    """
    client = settings.client()
    try:
        pinned = _pinned(reference, out)
        download = plan_download(pinned, out / SOURCE_FOLDER, settings, client=client)
        hub = HubSource(download.listing, client=client)
        source = ArrivingSource(download, hub)
        return HubCheckpoint(
            reference=reference,
            client=client,
            settings=settings,
            download=download,
            source=source,
            checkpoint=open_checkpoint(source),
        )
    except BaseException:
        client.close()
        raise


def plan_from_hub(
    hub: HubCheckpoint,
    out: Path,
    plan: ExportPlan,
    *,
    free: Callable[[Path], int] = free_bytes,
) -> ArrivalPlan:
    """Plan which shards arrive when, and refuse what the disk cannot hold.

    Args:
        hub: The source.
        out: Output folder, of which a journal says what is finished.
        plan: What to write.
        free: Tells the free bytes of a folder.

    Raises:
        ResourceError: The disk cannot hold the output and the shards of its hungriest file.
        StructureError: The journal is damaged.
    """
    journal = read_journal(out)
    finished = journal.finished.keys() if journal else ()
    beside = sum(hub.source.files[name].size for name in plan.sidecars)
    return plan_arrival(
        hub.checkpoint,
        [file for file in plan.files if file.name not in finished],
        out,
        here=_bytes_on_disk(out / SOURCE_FOLDER),
        beside=2 * beside,  # they arrive, and are copied
        free=free,
    )


def convert_from_hub(
    hub: HubCheckpoint,
    out: Path,
    plan: ExportPlan,
    settings: ConvertSettings,
    progress: Progress = SILENT,
    *,
    free: Callable[[Path], int] = free_bytes,
) -> ConvertResult:
    """Download, prove and convert shard by shard, removing each after its last use.

    Args:
        hub: The source.
        out: Output folder, empty or with the journal of the same job.
        plan: What to write.
        settings: How; the commit is added to the parameters.
        progress: Told the source bytes that were converted.
        free: Tells the free bytes of a folder.

    Raises:
        RefusedError: The folder holds something else, a weight would change under
            `require_lossless`, or the server's files are not the listing's.
        HashError: A file was twice not what it must be.
        IncompleteError: The server has lost a file.
        ValuesError: A value cannot be represented.
        ResourceError: The disk or the server failed, or the disk cannot hold what it must.
    """
    arrival = plan_from_hub(hub, out, plan, free=free)
    supply = Arriving(
        hub.client,
        hub.source,
        hub.download,
        arrival,
        beside=plan.sidecars,
        settings=hub.settings,
        progress=progress,
    )
    parameters: dict[str, Any] = {**settings.parameters, _PARAMETER: dict(hub.identity())}
    settings = replace(settings, parameters=parameters)
    result = run_convert(hub.checkpoint, out, plan, settings, progress, supply=supply)
    shutil.rmtree(out / SOURCE_FOLDER)
    return result


def _pinned(reference: Reference, out: Path) -> Reference:
    """Return the commit that an earlier run into the folder resolved the same reference to."""
    journal = read_journal(out)
    source = journal.job.parameters.get(_PARAMETER) if journal else None
    if not isinstance(source, dict):
        return reference
    asked = (source.get("repository"), source.get("revision"))
    if asked != (reference.repository, reference.revision):
        return reference  # another job, which the journal refuses
    return reference.at(source["commit"])


def _bytes_on_disk(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total
