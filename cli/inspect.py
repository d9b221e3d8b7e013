"""`k3quant inspect`: what a checkpoint holds."""

from typing import Annotated

import typer

from k3quant.cli.options import JsonOpt, QuietOpt
from k3quant.cli.output import session, table


def inspect(
    place: Annotated[
        str, typer.Argument(help="Checkpoint folder, config.json, or built-in name (kimi-k3).")
    ],
    scales: Annotated[
        bool, typer.Option("--scales", help="Count the E8M0 scale bytes of the routed experts.")
    ] = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Count tensors, parameters and bytes by family, layer and shard.

    Example: k3quant inspect kimi-k3
    """
    with session("inspect", json=json, quiet=quiet) as out:
        from k3quant.describe import describe

        found = describe(place, scales=scales, progress=out.progress())
        out.done(found.to_json(), _lines(found.to_json()))


def _lines(doc: dict[str, object]) -> list[str]:
    from k3quant.sizes import format_size

    lines = [f"{doc['place']} ({doc['kind']})"]
    if "tensors" in doc:
        lines += [
            f"tensors            {doc['tensors']:,}",
            f"parameters         {doc['parameters']:,}",
            f"active parameters  {doc['active_parameters']:,}",
            f"tensor bytes       {doc['tensor_bytes']:,}",
            "",
        ]
        families: dict[str, dict[str, int]] = doc["families"]  # type: ignore[assignment]
        rows = [
            [name, f"{n['tensors']:,}", f"{n['parameters']:,}", format_size(n["tensor_bytes"])]
            for name, n in families.items()
        ]
        lines += table(["family", "tensors", "parameters", "bytes"], rows)
    if "layers" in doc:
        layers: list[dict[str, object]] = doc["layers"]  # type: ignore[assignment]
        lines += ["", *_layer_map(layers)]
    if "dtypes" in doc:
        dtypes: dict[str, dict[str, int]] = doc["dtypes"]  # type: ignore[assignment]
        rows = [
            [name, f"{n['tensors']:,}", format_size(n["tensor_bytes"])]
            for name, n in dtypes.items()
        ]
        lines += ["", *table(["stored as", "tensors", "bytes"], rows)]
    shards: list[dict[str, object]] = doc["shards"]  # type: ignore[assignment]
    rows = [
        [str(s["file"]), str(s["content"]), f"{s['tensors']:,}", f"{s['tensor_bytes']:,}"]
        for s in shards
    ]
    shown = rows if len(rows) <= 16 else [*rows[:6], ["...", "", "", ""], *rows[-4:]]
    lines += ["", *table(["shard", "content", "tensors", "tensor bytes"], shown)]
    if "scales" in doc:
        scales: dict[str, dict[str, int]] = doc["scales"]  # type: ignore[assignment]
        lines += ["", *_histogram(scales)]
    return lines


def _layer_map(layers: list[dict[str, object]]) -> list[str]:
    marks = "".join(
        {"kda": "k", "mla": "M"}[str(layer["attention"])] if layer["mlp"] == "moe" else "d"
        for layer in layers
    )
    kda = sum(layer["attention"] == "kda" for layer in layers)
    dense = sum(layer["mlp"] == "dense" for layer in layers)
    return [
        f"layers  {len(layers)}: {kda} KDA, {len(layers) - kda} MLA, {dense} with a dense MLP",
        f"        {marks}  (k KDA, M MLA, d dense)",
    ]


def _histogram(scales: dict[str, dict[str, int]]) -> list[str]:
    rows = []
    for matrix, counts in scales.items():
        total = sum(counts.values())
        for byte, count in counts.items():
            share = count / total
            rows.append([f"{matrix} 2^{int(byte) - 127}", byte, f"{count:,}", f"{share:.2%}"])
    return table(["scale", "byte", "blocks", "share"], rows)
