"""`k3quant eval` and `k3quant trace`: run the whole model, one layer in memory at a time."""

from pathlib import Path
from typing import Annotated

import typer

from k3quant.cli.options import JsonOpt, OutOpt, QuietOpt
from k3quant.cli.output import session

CheckpointArg = Annotated[Path, typer.Argument(help="Checkpoint folder.")]
DtypeOpt = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
DeviceOpt = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


def evaluate(
    checkpoint: CheckpointArg,
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text to score.")] = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", help="Ids instead: safetensors, .npy or JSON lines."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Lines of text with pictures and videos instead, as JSON."),
    ] = None,
    ctx: Annotated[int, typer.Option("--ctx", min=1, help="Ids a window reads.")] = 512,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, help="Ids between windows; default: --ctx.")
    ] = None,
    bos: Annotated[bool, typer.Option("--bos", help="Begin every window with BOS.")] = False,
    dtype: DtypeOpt = "float32",
    device: DeviceOpt = "cpu",
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="Checkpoint to compare with: KL, agreement, error."),
    ] = None,
    vram: Annotated[
        str | None, typer.Option("--vram", help="Device memory budget, such as 20GB.")
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", help="Memory budget, such as 40GB.")] = None,
    teacher_forced: Annotated[
        bool,
        typer.Option(
            "--teacher-forced/--no-teacher-forced",
            help="Also feed each layer with the reference's stream: which one is to blame?",
        ),
    ] = True,
    noise_floor: Annotated[
        bool,
        typer.Option("--noise-floor", help="Also measure the reference against its own rounding."),
    ] = False,
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder to resume from, layer by layer.")
    ] = None,
    save_hidden: Annotated[
        Path | None, typer.Option("--save-hidden", help="Keep what lm_head reads in this file.")
    ] = None,
    hidden: Annotated[
        Path | None, typer.Option("--hidden", help="Such a file: redo the head without a walk.")
    ] = None,
    reference_hidden: Annotated[
        Path | None, typer.Option("--reference-hidden", help="The reference's file beside it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the report to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as one web page.")
    ] = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Measure perplexity, and against a reference KL divergence and per-layer error.

    Example: k3quant eval ./kimi-k3-nvfp4 --text eval.txt --reference ./kimi-k3
    """
    with session("eval", json=json, quiet=quiet) as say:
        from k3quant.cli.eval_lines import eval_lines
        from k3quant.errors import UsageError
        from k3quant.eval.perplexity import evaluate as run
        from k3quant.eval.settings import EvalSettings
        from k3quant.report import Report
        from k3quant.sizes import parse_size

        settings = EvalSettings(
            ctx=ctx,
            stride=stride,
            bos=bos,
            dtype=dtype,  # type: ignore[arg-type]  # the settings refuse other words
            device=device,  # type: ignore[arg-type]
            vram_bytes=parse_size(vram) if vram else None,
            ram_bytes=parse_size(ram) if ram else None,
            teacher_forced=teacher_forced,
            noise_floor=noise_floor,
        )
        given = [x for x in (text, tokens, data, hidden) if x is not None]
        if len(given) > 1:
            raise UsageError("eval: expected one of --text, --tokens, --data and --hidden")
        if data is not None or hidden is not None:
            extras = [noise_floor, state, save_hidden, html]
            if any(extras):
                raise UsageError(
                    "eval: expected neither --noise-floor, --state, --save-hidden nor --html with "
                    "--data or --hidden"
                )
        if data is not None:
            from k3quant.cli.eval_data import score_data

            score_data(say, checkpoint, data, reference=reference, settings=settings, out=out)
        if hidden is not None or reference_hidden is not None:
            from k3quant.cli.eval_hidden import score_states

            sides = (checkpoint, hidden), (reference, reference_hidden)
            score_states(say, *sides, settings=settings, out=out)
        result = run(
            checkpoint,
            text=text,
            tokens=tokens,
            reference=reference,
            settings=settings,
            state=state,
            save_hidden=save_hidden,
            progress=say.progress(),
        )
        report = Report(command="eval", summary=result.to_json())
        if out is not None:
            from k3quant.checkpoint.writer import atomic_write

            atomic_write(out, report.encode())
        if html is not None:
            from k3quant.checkpoint.writer import atomic_write
            from k3quant.eval.report_page import eval_page

            atomic_write(html, eval_page(report.to_json()).encode())
        say.report(report, eval_lines(result))


def trace(
    checkpoint: CheckpointArg,
    tokens: Annotated[
        Path, typer.Option("--tokens", help="One list of ids: safetensors, .npy or JSON line.")
    ],
    out: OutOpt,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Keep only these layers, such as 0-3.")
    ] = None,
    dtype: DtypeOpt = "float32",
    device: DeviceOpt = "cpu",
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Write the intermediate tensors of one prefill, for people who port the model.

    Example: k3quant trace ./kimi-k3 --tokens prompt.npy --out trace.safetensors
    """
    with session("trace", json=json, quiet=quiet) as say:
        from k3quant.cli.options import parse_range
        from k3quant.eval.settings import EvalSettings
        from k3quant.eval.trace import TraceSettings
        from k3quant.eval.trace import trace as run
        from k3quant.sizes import format_size

        bounds = parse_range(layers, "--layers")
        settings = TraceSettings(
            layers=None if bounds is None else range(bounds[0], bounds[1] + 1),
            evaluation=EvalSettings(dtype=dtype, device=device),  # type: ignore[arg-type]
        )
        written = run(checkpoint, tokens, out, settings=settings, progress=say.progress())
        summary = {"out": str(out), "file_bytes": written.size, "sha256": written.sha256}
        say.done(summary, [f"{out}: {format_size(written.size)}"])
