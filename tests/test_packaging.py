"""The package is what the folders are, and importing it costs what it should."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("cli", "kernels", "manifests")


def project() -> dict[str, object]:
    document: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return document


def test_listed_packages_are_the_folders() -> None:
    found = {"k3quant", *(f"k3quant.{name}" for name in LINKED)}
    for init in (ROOT / "k3quant").glob("*/__init__.py"):
        found.add(f"k3quant.{init.parent.name}")
    listed = project()["tool"]["setuptools"]["packages"]  # type: ignore[index]
    assert set(listed) == found
    assert listed == sorted(listed)


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_links_without_an_init(name: str) -> None:
    link = ROOT / "k3quant" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name
    # A regular top-level package `kernels` breaks other packages' imports from this folder.
    assert not (ROOT / name / "__init__.py").exists()


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import k3quant", id="package"),
        pytest.param("import k3quant.cli.main", id="command-line"),
        pytest.param("import k3quant.verify.run", id="verify"),
        pytest.param("import k3quant.repack.run", id="repack"),
        pytest.param("import k3quant.hub.download", id="download"),
        pytest.param("import k3quant.describe, k3quant.manifest_create", id="inspect"),
    ],
)
def test_no_torch_where_none_is_needed(code: str) -> None:
    loaded = loaded_by(code)
    assert not loaded & {"torch", "triton", "numba"}


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['k3quant', '--help']\n"
        "from k3quant.cli.main import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass"
    )
    assert not loaded_by(code) & {"torch", "triton", "numba", "numpy"}


@pytest.mark.parametrize(
    "module", ["verify.run", "convert.run", "eval.perplexity", "repack.run", "synth.run", "demo"]
)
def test_library_knows_no_command_line(module: str) -> None:
    assert not loaded_by(f"import k3quant.{module}") & {"typer", "rich"}


def test_evaluation_on_the_cpu_loads_no_triton() -> None:
    assert "triton" not in loaded_by("import k3quant.eval.perplexity, k3quant.convert.run")


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    limits = {"k3quant": 400, "cli": 400, "kernels": 400, "benchmarks": 400, "tests": 600}
    long = {
        str(file.relative_to(ROOT)): count
        for folder, limit in limits.items()
        for file in (ROOT / folder).rglob("*.py")
        if "data" not in file.parts and (count := len(file.read_text().splitlines())) > limit
    }
    assert long == {}
