"""`k3quant convert` and `k3quant requantize`: change precision, prove what that changed."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3quant.cli.options import (
    DryRunOpt,
    JobsOpt,
    JsonOpt,
    ManifestOpt,
    OutOpt,
    QuietOpt,
    RevisionOpt,
)
from k3quant.cli.output import Output, session, table

if TYPE_CHECKING:
    from k3quant.checkpoint.reader import Checkpoint
    from k3quant.convert.export_plan import ExportPlan
    from k3quant.convert.run import ConvertResult, ConvertSettings

SourceArg = Annotated[
    str, typer.Argument(help="Checkpoint folder, or hf://owner/name@revision: shard by shard.")
]
LosslessOpt = Annotated[
    bool, typer.Option("--require-lossless", help="Refuse (exit 9) a weight that would change.")
]
SkipOpt = Annotated[
    list[str] | None,
    typer.Option("--allow-skip", help="Leave out unknown tensors whose name this matches."),
]
HashOpt = Annotated[bool, typer.Option(help="State the sha256 of every source shard in the proof.")]
Plan = Callable[["Checkpoint"], "ExportPlan"]

# One file of 1.5 TB could neither be resumed nor written by several threads.
_GGUF_FILE_BYTES = 50_000_000_000
_MLX_FILE_BYTES = 5_000_000_000


def convert(
    source: SourceArg,
    out: OutOpt,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="bf16, fp8-block, fp8-channel, mxfp8, mxfp4, nvfp4, int8, int4, gguf or mlx.",
        ),
    ],
    scheme: Annotated[
        str, typer.Option("--scheme", help="compressed-tensors or modelopt.")
    ] = "compressed-tensors",
    rounding: Annotated[
        str, typer.Option("--scale-rule", help="E8M0 scale rule: floor, ceil, even or rceil.")
    ] = "even",
    group_size: Annotated[int, typer.Option("--group-size", help="INT4 group: 32 or 128.")] = 32,
    float_type: Annotated[
        str, typer.Option("--float-type", help="GGUF type of the rest: F32, F16, BF16, Q8_0.")
    ] = "BF16",
    max_file_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Split GGUF or MLX files at this size.")
    ] = None,
    require_lossless: LosslessOpt = False,
    allow_skip: SkipOpt = None,
    source_hash: HashOpt = True,
    revision: RevisionOpt = None,
    manifest: ManifestOpt = None,
    dry_run: DryRunOpt = False,
    jobs: JobsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Convert the routed experts to another format and keep everything else.

    From the Hub, shards are downloaded, converted and removed one after the other.

    Example: k3quant convert ./kimi-k3 --out ./kimi-k3-nvfp4 --to nvfp4
    """
    with session("convert", json=json, quiet=quiet) as say:
        from k3quant.errors import UsageError
        from k3quant.formats.mx import ScaleRounding
        from k3quant.sizes import parse_size

        if rounding not in set(ScaleRounding):
            raise UsageError(f"--scale-rule: expected floor, ceil, even or rceil, got `{rounding}`")
        limit = parse_size(max_file_size) if max_file_size else None
        parameters = {
            "to": to, "scheme": scheme, "scale_rule": rounding, "group_size": group_size,
            "float_type": float_type, "max_file_bytes": limit, "allow_skip": allow_skip or [],
        }  # fmt: skip

        def plan(checkpoint: "Checkpoint") -> "ExportPlan":
            if to == "gguf":
                from k3quant.schemes.gguf import plan_gguf

                return plan_gguf(
                    checkpoint,
                    float_type=float_type,
                    max_file_bytes=limit or _GGUF_FILE_BYTES,
                    allow_skip=allow_skip or (),
                )
            if to == "mlx":
                from k3quant.schemes.mlx import plan_mlx

                return plan_mlx(
                    checkpoint,
                    max_file_bytes=limit or _MLX_FILE_BYTES,
                    allow_skip=allow_skip or (),
                )
            from k3quant.convert.plan import plan_export
            from k3quant.convert.recipe import recipe_for

            recipe = recipe_for(
                to, scheme=scheme, rounding=ScaleRounding(rounding), group_size=group_size
            )
            return plan_export(checkpoint, recipe, allow_skip=allow_skip or ())

        settings = _settings(parameters, require_lossless, jobs, source_hash)
        _run(say, source, out, plan, settings, revision, manifest, dry_run=dry_run)


def requantize(
    source: SourceArg,
    out: OutOpt,
    recipe: Annotated[str, typer.Option("--recipe", help="Recipe file (TOML) or built-in name.")],
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="Spell it otherwise than the recipe says.")
    ] = None,
    require_lossless: LosslessOpt = False,
    allow_skip: SkipOpt = None,
    source_hash: HashOpt = True,
    revision: RevisionOpt = None,
    manifest: ManifestOpt = None,
    dry_run: DryRunOpt = False,
    jobs: JobsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Convert by a recipe: ordered rules that give families, layers or patterns a format.

    Example: k3quant requantize ./kimi-k3 --out ./mixed --recipe nvfp4-experts-fp8-attention
    """
    with session("requantize", json=json, quiet=quiet) as say:
        from dataclasses import replace

        from k3quant.convert.plan import plan_export
        from k3quant.convert.recipe import load_recipe

        rules = load_recipe(recipe)
        if scheme is not None:
            rules = replace(rules, scheme=scheme)
        parameters = {
            "recipe": repr(rules), "scheme": rules.scheme, "allow_skip": allow_skip or []
        }  # fmt: skip

        def plan(checkpoint: "Checkpoint") -> "ExportPlan":
            return plan_export(checkpoint, rules, allow_skip=allow_skip or ())

        settings = _settings(parameters, require_lossless, jobs, source_hash)
        _run(say, source, out, plan, settings, revision, manifest, dry_run=dry_run)


def _settings(
    parameters: dict[str, Any], lossless: bool, jobs: int | None, source_hash: bool
) -> "ConvertSettings":
    from k3quant.convert.run import ConvertSettings

    return ConvertSettings(
        parameters=parameters, require_lossless=lossless, jobs=jobs, hash_source=source_hash
    )


def _run(
    say: Output,
    source: str,
    out: Path,
    make_plan: Plan,
    settings: "ConvertSettings",
    revision: str | None,
    manifest: str | None,
    *,
    dry_run: bool,
) -> None:
    from k3quant.hub.reference import is_reference

    if is_reference(source):
        _run_from_hub(say, source, out, make_plan, settings, revision, manifest, dry_run=dry_run)
        return
    from k3quant.checkpoint.reader import open_checkpoint
    from k3quant.convert.run import run_convert
    from k3quant.errors import UsageError

    if revision or manifest:
        raise UsageError(
            f"{source}: expected `hf://owner/name` with --revision and --manifest, got a folder",
            hint="`k3quant verify --manifest` checks a folder",
        )
    checkpoint = open_checkpoint(Path(source))
    plan = make_plan(checkpoint)
    if dry_run:
        _say_forecast(say, checkpoint, out, plan, settings)
    result = run_convert(checkpoint, out, plan, settings, say.progress())
    _say_result(say, out, plan, result, {})


def _run_from_hub(
    say: Output,
    place: str,
    out: Path,
    make_plan: Plan,
    settings: "ConvertSettings",
    revision: str | None,
    manifest: str | None,
    *,
    dry_run: bool,
) -> None:
    from k3quant.convert.dry_run import forecast
    from k3quant.convert.from_hub import convert_from_hub, open_from_hub, plan_from_hub
    from k3quant.hub.reference import parse_reference
    from k3quant.hub.settings import DownloadSettings
    from k3quant.manifest import load_manifest
    from k3quant.sizes import format_size

    known = load_manifest(manifest) if manifest else None
    reference = parse_reference(place, revision)
    hub = open_from_hub(reference, out, DownloadSettings(manifest=known))
    try:
        plan = make_plan(hub.checkpoint)
        arrival = plan_from_hub(hub, out, plan)
        found = {"source": dict(hub.identity())} | arrival.summary()
        at_once = format_size(arrival.room_bytes)
        say.say(f"{hub.source.label}: at most {at_once} of the source lie on the disk at once")
        if dry_run:
            proven: dict[tuple[str, str], tuple[int, int]] = {}  # scales are too many to fetch
            summary = forecast(plan, proven) | found
            say.done(summary, _forecast_lines(plan, summary))
        result = convert_from_hub(hub, out, plan, settings, say.progress())
    finally:
        hub.client.close()
    _say_result(say, out, plan, result, found)


def _say_forecast(
    say: Output,
    checkpoint: "Checkpoint",
    out: Path,
    plan: "ExportPlan",
    settings: "ConvertSettings",
) -> None:
    from dataclasses import asdict

    from k3quant.convert.dry_run import exactness, forecast
    from k3quant.convert.estimate import estimate
    from k3quant.sizes import format_duration, format_size

    found = forecast(plan, exactness(checkpoint, plan, say.progress()))
    time = estimate(checkpoint, plan, out, jobs=settings.jobs, hash_source=settings.hash_source)
    found["time"] = asdict(time)
    lines = _forecast_lines(plan, found)
    lines.append(
        f"about {format_duration(time.seconds)} here: {time.jobs} files at a time take "
        f"{format_duration(time.processor_seconds)} to compute, the disk "
        f"{format_duration(time.disk_seconds)} at "
        f"{format_size(int(time.disk_bytes_per_second))}/s"
    )
    say.done(found, lines)


def _forecast_lines(plan: "ExportPlan", found: dict[str, Any]) -> list[str]:
    from k3quant.sizes import format_size

    rows = [
        [f["family"], f["target"], f"{f['tensors']:,}", format_size(f["source_bytes"]),
         format_size(f["target_bytes"]), f["exact"]]
        for f in found["families"]
    ]  # fmt: skip
    lines = table(["family", "format", "weights", "now", "then", "exact"], rows)
    lines.append(f"{len(plan.files)} files, {format_size(found['target_bytes'])}")
    return lines


def _say_result(
    say: Output,
    out: Path,
    plan: "ExportPlan",
    result: "ConvertResult",
    more: dict[str, Any],
) -> None:
    from k3quant.sizes import format_size

    total = sum(file.size for file in result.files)
    summary = {
        "out": str(out),
        "target": plan.target,
        "scheme": plan.scheme,
        "exact": result.exact,
        "files": len(result.files),
        "file_bytes": total,
        "resumed": result.resumed,
        "families": result.summary,
        "skipped": len(plan.skipped),
        "transforms": dict(plan.transforms),
    } | more
    rows = [
        [key, f"{n['weights']:,}", f"{n['exact']:,}", f"{n['blocks_rescued']:,}",
         f"{n['max_abs']:.3g}", "" if n["worst_sqnr_db"] is None else f"{n['worst_sqnr_db']:.1f}"]
        for key, n in result.summary.items()
    ]  # fmt: skip
    lines = table(["weights", "count", "exact", "rescued", "largest error", "worst dB"], rows)
    kept = "every value kept" if result.exact else "some values changed"
    lines.append(f"{out}: {len(result.files)} files, {format_size(total)}, {kept}")
    say.done(summary, lines)
