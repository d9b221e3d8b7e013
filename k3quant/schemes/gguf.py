"""Kimi-K3 as GGUF: one file, or parts that a reader finds from the first.

MXFP4 experts keep every bit; other matrices keep bfloat16 by default and vectors widen to float32,
so that only what llama.cpp wants folded changes at all.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from k3quant.checkpoint.folder import LocalFolder, Source
from k3quant.checkpoint.reader import Checkpoint
from k3quant.convert.export_plan import ExportPlan, FilePlan
from k3quant.errors import IncompleteError, UsageError
from k3quant.models.k3_config import K3Config, read_config
from k3quant.models.tokenizer import CONFIG_FILE, RANKS_FILE, Tokenizer
from k3quant.schemes.bundles import (
    Bundle,
    account_for_all,
    experts_are_packed,
    fill_files,
    forecast,
)
from k3quant.schemes.gguf_file import (
    MetaField,
    TensorInfo,
    encode_file,
    header_bytes,
    padded,
)
from k3quant.schemes.gguf_metadata import (
    FILE_TYPES,
    model_fields,
    split_fields,
    tokenizer_fields,
)
from k3quant.schemes.gguf_tensors import TRANSFORMS, plan_bundles

FloatType = Literal["F32", "F16", "BF16", "Q8_0"]

MAX_PARTS = 65_535  # the count is a u16
_PART = re.compile(r"-\d{5}-of-\d{5}$")

# Source: ggml-org/llama.cpp, `src/llama-hparams.h`, `LLAMA_MAX_EXPERTS`.
OLD_EXPERT_LIMIT = 512
EXPERT_LIMIT = 1024


def plan_gguf(
    checkpoint: Checkpoint,
    *,
    float_type: str = "BF16",
    max_file_bytes: int | None = None,
    stem: str = "model",
    allow_skip: Collection[str] = (),
) -> ExportPlan:
    """Plan a GGUF export.

    Args:
        checkpoint: A Kimi-K3 whose experts are MXFP4 pairs or floats.
        float_type: Type of matrices that are not MXFP4: `F32`, `F16`, `BF16` or `Q8_0`.
        max_file_bytes: Parts grow up to this size; a tensor that is larger stands alone. None
            writes one file, which one thread fills.
        stem: File name without `.gguf`; parts are called `<stem>-00001-of-00003.gguf`.
        allow_skip: Regular expressions; an unknown tensor that one matches whole may stay behind.

    Returns:
        The plan; its only files are the GGUF's.

    Raises:
        UsageError: The type is unknown, or the stem is a path or the name of a file or part.
        SchemaError: Config, tensors or tokenizer are not Kimi-K3's.
        RefusedError: The target cannot hold the model, or a tensor would be lost.
        IncompleteError: The tokenizer's files are missing.
    """
    _check_stem(stem)
    if float_type not in get_args(FloatType):
        raise UsageError(
            f"float type: expected {' or '.join(get_args(FloatType))}, got `{float_type}`"
        )
    config = read_config(checkpoint.config)
    packed = experts_are_packed(checkpoint)
    fields = model_fields(
        config, name=stem, file_type=FILE_TYPES["MXFP4" if packed else float_type]
    )
    fields += tokenizer_fields(config, _load_tokenizer(checkpoint.source))
    bundles = list(plan_bundles(config, checkpoint, packed=packed, float_type=float_type))
    skipped = account_for_all(checkpoint, bundles, config, allow_skip=allow_skip)
    return ExportPlan(
        target="gguf",
        scheme="gguf",
        files=tuple(_lay_out(fields, bundles, max_file_bytes=max_file_bytes, stem=stem)),
        documents={},
        sidecars=(),
        skipped=skipped,
        transforms={**TRANSFORMS, **_runtime_note(config)},
        forecasts=forecast(bundles),
    )


def _runtime_note(config: K3Config) -> dict[str, str]:
    experts = config.moe.num_experts
    if experts <= OLD_EXPERT_LIMIT:
        return {}
    needs = f"llama.cpp with LLAMA_MAX_EXPERTS of at least {experts}"
    known = f"{EXPERT_LIMIT} since it knows kimi-k3, {OLD_EXPERT_LIMIT} before"
    return {"runtime": f"{experts} experts need {needs} ({known})"}


def _lay_out(
    fields: Sequence[MetaField],
    bundles: Sequence[Bundle],
    *,
    max_file_bytes: int | None,
    stem: str,
) -> list[FilePlan]:
    split = split_fields(0, 1, 0)
    parts = fill_files(
        bundles,
        max_bytes=max_file_bytes,
        cost=_cost,
        first_cost=header_bytes([*fields, *split], ()),
        other_cost=header_bytes(split, ()),
    )
    if len(parts) > MAX_PARTS:
        raise UsageError(
            f"file size: expected a bound that gives at most {MAX_PARTS} parts, got {len(parts)}"
        )
    if len(parts) == 1:
        return [_file_plan(f"{stem}.gguf", fields, parts[0])]
    total = sum(len(bundle.tensors) for bundle in bundles)
    files = []
    for number, part in enumerate(parts):
        own = split_fields(number, len(parts), total)
        head = [*fields, *own] if number == 0 else own
        files.append(_file_plan(f"{stem}-{number + 1:05d}-of-{len(parts):05d}.gguf", head, part))
    return files


def _cost(bundle: Bundle) -> int:
    infos = _infos(bundle)
    return sum(padded(info.num_bytes) + len(info.encode(0)) for info in infos)


def _file_plan(name: str, fields: Sequence[MetaField], bundles: Sequence[Bundle]) -> FilePlan:
    header, places, size = encode_file(fields, [i for bundle in bundles for i in _infos(bundle)])
    return FilePlan(
        name=name,
        header=header,
        places=places,
        file_bytes=size,
        units=tuple(unit for bundle in bundles for unit in bundle.units),
    )


def _infos(bundle: Bundle) -> list[TensorInfo]:
    return [TensorInfo(tensor.name, tensor.dtype, tensor.shape) for tensor in bundle.tensors]


def _check_stem(stem: str) -> None:
    if not stem or stem in {".", ".."} or "/" in stem or "\\" in stem:
        raise UsageError(f"stem: expected a file name without folders, got `{stem}`")
    bare = stem.removesuffix(".gguf")
    if bare != stem or _PART.search(bare):
        raise UsageError(
            f"stem: expected a name without `.gguf` and part numbers, got `{stem}`",
            hint=f"say `{_PART.sub('', bare)}`; the export numbers its parts itself",
        )


def _load_tokenizer(source: Source) -> Tokenizer:
    if isinstance(source, LocalFolder):
        return Tokenizer.load(source.root)
    with TemporaryDirectory(prefix="k3quant-") as folder:
        for file in (RANKS_FILE, CONFIG_FILE):
            info = source.files.get(file)
            if info is None:
                raise IncompleteError(f"{source.label}: expected {file}, got none")
            (Path(folder) / file).write_bytes(source.read(file, 0, info.size))
        return Tokenizer.load(Path(folder))
