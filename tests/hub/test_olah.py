"""Through an independent caching proxy, olah, where it is installed; it has its own venv.

`K3QUANT_OLAH=/path/to/olah-cli pytest tests/hub/test_olah.py` runs these.
"""

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3quant.hub.source import HubSource
from k3quant.repack.run import run_repack
from k3quant.repack.settings import RepackSettings
from k3quant.report import Report
from k3quant.verify.run import Level, VerifySettings, verify

Run = Callable[..., Report]

OLAH = os.environ.get("K3QUANT_OLAH") or shutil.which("olah-cli")
CHECKPOINT = Path(__file__).parents[1] / "data" / "oracle" / "ckpt_k3"
SHARD = "model-00002-of-000003.safetensors"

pytestmark = pytest.mark.skipif(OLAH is None, reason="olah is not installed")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def olah(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    assert OLAH is not None
    port, far = free_port(), hub.url.removeprefix("http://")
    config = tmp_path / "olah.toml"
    config.write_text(
        f'[basic]\nhost = "127.0.0.1"\nport = {port}\nrepos-path = "{tmp_path / "repos"}"\n'
        f'hf-scheme = "http"\nhf-netloc = "{far}"\nhf-lfs-netloc = "{far}"\n'
        f'mirror-scheme = "http"\nmirror-netloc = "127.0.0.1:{port}"\n'
        f'mirror-lfs-netloc = "127.0.0.1:{port}"\nmetadata-cache-ttl = 0\n'
    )
    log = (tmp_path / "olah.log").open("w")
    command = [OLAH, "--config", str(config), "--log-path", str(tmp_path / "logs")]
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/api/models/test/repo/revision/main", timeout=5).close()
            break
        except urllib.error.HTTPError:
            break
        except OSError:
            time.sleep(0.1)
    hub.seen.clear()
    monkeypatch.setenv("HF_ENDPOINT", url)
    yield url
    process.terminate()
    process.wait(10)
    log.close()


@pytest.mark.usefixtures("olah")
def test_download_and_again(hub: Any, download: Run, out: Path, files: dict[str, bytes]) -> None:
    report = download(stall_timeout=20)
    assert report.summary["state"] == "complete"
    for path in out.rglob("*"):
        if path.is_file() and path.name != "k3quant.download.json":
            assert path.read_bytes() == files[path.relative_to(out).as_posix()]
    assert download(stall_timeout=20).summary["fetched_files"] == 0


@pytest.mark.usefixtures("olah")
def test_proxy_serves_the_second_download_from_its_cache(
    hub: Any, download: Run, out: Path
) -> None:
    download(stall_timeout=20)
    shutil.rmtree(out)
    hub.seen.clear()
    assert download(stall_timeout=20).ok
    assert hub.sent(SHARD) == 0


@pytest.mark.usefixtures("olah")
def test_pinned_commit(hub: Any, repo: Any, download: Run) -> None:
    assert download(repo.head, stall_timeout=20).summary["commit"] == repo.head


@pytest.mark.usefixtures("olah")
def test_verify_and_cut(
    hub: Any, hub_server: Any, repo: Any, download: Run, out: Path, tmp_path: Path
) -> None:
    repo.commit({n: p.read_bytes() for n, p in hub_server.folder_files(CHECKPOINT).items()})
    assert verify(HubSource("hf://test/repo"), VerifySettings(level=Level.SCHEMA)).ok
    assert download(layers=(4, 7), stall_timeout=20).ok
    run_repack(CHECKPOINT, tmp_path / "repacked", RepackSettings(layers=(4, 7)))
    for path in (tmp_path / "repacked").glob("*.safetensors"):
        assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("olah")
def test_wrong_bytes_from_afar_are_found(hub: Any, download: Run, out: Path) -> None:
    hub.fault(SHARD, times=1000, flip_at=200_000)
    report = download(stall_timeout=20)
    assert report.exit_code == 5
    assert not (out / SHARD).exists()
