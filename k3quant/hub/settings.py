"""Settings of a download."""

from dataclasses import dataclass

from k3quant.errors import UsageError
from k3quant.hub.client import STALL_TIMEOUT, HubClient
from k3quant.hub.patience import RetryPolicy
from k3quant.manifest import Manifest
from k3quant.repack.settings import Span

PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSettings:
    """Settings of a download.

    Attributes:
        include: Groups, file names and patterns to have; empty is the whole checkpoint.
        layers: Decoder layers to cut out, first and last, as `repack` does; None for all.
        experts: Routed experts to cut out of each layer, first and last; None for all.
        manifest: What the files must be, besides what the Hub says.
        jobs: Connections, and files in flight.
        piece_bytes: What a killed download may have to fetch again, for each connection.
        stall_timeout: Seconds without bytes, or with next to none, after which to reconnect.
        attempts: Tries in a row without progress before a fault is final.
        retry_wait: Seconds before the second try; doubled each time, or what the server asks for.
        rate_limit: Most bytes per second over all connections; None sets no limit.
        rehash: Hash every file that is there, also those that a record of this download proves.
        verify_only: Check what is there and fetch nothing.
        accept_new_commit: Go on in a folder that was begun at another commit.
        endpoint: Base URL of the Hub; None takes `HF_ENDPOINT` or the public one.
    """

    include: tuple[str, ...] = ()
    layers: Span | None = None
    experts: Span | None = None
    manifest: Manifest | None = None
    jobs: int = 8
    piece_bytes: int = PIECE_BYTES
    stall_timeout: float = STALL_TIMEOUT
    attempts: int = 6
    retry_wait: float = 1.0
    rate_limit: int | None = None
    rehash: bool = False
    verify_only: bool = False
    accept_new_commit: bool = False
    endpoint: str | None = None

    def __post_init__(self) -> None:
        counts = (self.jobs, self.piece_bytes, self.stall_timeout, self.attempts)
        if min(counts) <= 0 or self.retry_wait < 0 or (self.rate_limit or 1) <= 0:
            raise ValueError("download settings: expected counts, sizes and times above 0")

        if self.include and self.is_cut:
            raise UsageError(
                "download: expected `--include` or a cut of layers and experts, got both",
                hint="a cut brings all files that are no weights along",
            )

    @property
    def is_cut(self) -> bool:
        """Whether layers or experts are left out."""
        return self.layers is not None or self.experts is not None

    @property
    def cut_label(self) -> str:
        """The cut in words, empty where nothing is left out."""
        parts = [
            f"{what} {span[0]}-{span[1]}"
            for what, span in (("layers", self.layers), ("experts", self.experts))
            if span is not None
        ]
        return ", ".join(parts)

    def client(self) -> HubClient:
        """Return a client for the endpoint.

        Raises:
            UsageError: The endpoint is no URL, or the network is forbidden.
        """
        policy = RetryPolicy(attempts=self.attempts, first_wait=self.retry_wait)
        return HubClient(endpoint=self.endpoint, stall_timeout=self.stall_timeout, policy=policy)
