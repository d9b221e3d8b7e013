"""`k3quant repack` and `k3quant synth`: any layout without changing a bit, and test checkpoints."""

from pathlib import Path
from typing import Annotated, Any

import typer

from k3quant.cli.options import DryRunOpt, JobsOpt, JsonOpt, OutOpt, QuietOpt, parse_range
from k3quant.cli.output import session

LayersOpt = Annotated[
    str | None, typer.Option("--layers", help="Cut out these decoder layers, such as 0-3.")
]
ExpertsOpt = Annotated[
    str | None, typer.Option("--experts", help="Cut out these routed experts, such as 0-15.")
]


def repack(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write.")] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="layer, original, or expert-rank:N.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Most bytes of a file, such as 5GB.")
    ] = None,
    layers: LayersOpt = None,
    experts: ExpertsOpt = None,
    align: Annotated[int, typer.Option("--align", help="Data starts at such a multiple.")] = 8,
    link: Annotated[
        bool, typer.Option("--link", help="Hard-link shards that stay what they are.")
    ] = False,
    rebuild_index: Annotated[
        bool, typer.Option("--rebuild-index", help="Trust headers, write the index anew.")
    ] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Rewrite the folder with one spare shard of space.")
    ] = False,
    dry_run: DryRunOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Change how tensors lie in files, bit for bit the same tensors.

    Example: k3quant repack ./kimi-k3 --out ./ranks --by expert-rank:32
    """
    with session("repack", json=json, quiet=quiet) as say:
        from k3quant.errors import UsageError
        from k3quant.repack.in_place import plan_in_place
        from k3quant.repack.plan import plan_repack
        from k3quant.repack.rebuild import rebuild_index as rebuild
        from k3quant.repack.run import run_repack
        from k3quant.repack.settings import RepackSettings, parse_layout
        from k3quant.sizes import parse_size

        layout, ranks = parse_layout(by) if by else (None, None)
        settings = RepackSettings(
            layout=layout,
            ranks=ranks,
            max_shard_bytes=parse_size(max_shard_size) if max_shard_size else None,
            layers=parse_range(layers, "--layers"),
            experts=parse_range(experts, "--experts"),
            align=align,
            link=link,
            rebuild_index=rebuild_index,
            in_place=in_place,
        )
        if dry_run:
            report = (
                plan_in_place(source, settings)
                if in_place
                else plan_repack(source, settings).report()
            )
        elif out is None and rebuild_index and settings == RepackSettings(rebuild_index=True):
            report = rebuild(source)
        elif out is None and not in_place:
            raise UsageError("--out: expected a folder to write, got none")
        else:
            report = run_repack(source, out or source, settings, say.progress())
        say.report(report, _lines(report.summary))


def synth(
    out: OutOpt,
    profile: Annotated[
        str, typer.Option("--profile", help="Built-in name (kimi-k3), nano, or a config.json.")
    ] = "kimi-k3",
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Holes for data: 1.56 TB apparent, 200 MB real.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the values.")] = 0,
    layers: LayersOpt = None,
    experts: ExpertsOpt = None,
    device: Annotated[
        str, typer.Option("--device", help="cpu or cuda; the bytes are the same.")
    ] = "cpu",
    jobs: JobsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Write a checkpoint with true headers and made-up values.

    Example: k3quant synth --profile kimi-k3 --out ./sparse --sparse
    """
    with session("synth", json=json, quiet=quiet) as say:
        from k3quant.manifest import load_config
        from k3quant.synth.run import synth as run
        from k3quant.verify.stream import default_jobs

        report = run(
            load_config(profile),
            out,
            sparse=sparse,
            seed=seed,
            layers=parse_range(layers, "--layers"),
            experts=parse_range(experts, "--experts"),
            device=device,
            jobs=jobs or default_jobs(),
            progress=say.progress(),
        )
        say.report(report, _lines(report.summary))


def _lines(summary: dict[str, Any]) -> list[str]:
    from k3quant.cli.output import table
    from k3quant.sizes import format_size

    rows = []
    for key, value in summary.items():
        if isinstance(value, (list, dict)):
            rows.append([key, f"{len(value):,}"])
        elif key.endswith("bytes") or key == "bytes_to_copy":
            rows.append([key, f"{value:,} ({format_size(value)})"])
        else:
            rows.append([key, f"{value:,}" if isinstance(value, int) else str(value)])
    return table(["repack", ""], rows)[2:]
