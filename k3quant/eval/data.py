"""Likelihood of text beside pictures and videos: `eval --data`.

Each line is one window of its own, read whole. What the model sees of a medium are its features,
put where the medium's id stands.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3quant.errors import IncompleteError, RefusedError, SchemaError, UsageError
from k3quant.eval.data_divergence import KINDS, DataMeter, Sums
from k3quant.eval.data_lines import DataLine
from k3quant.eval.data_report import DataDivergence, DataResult, LineScore
from k3quant.eval.data_side import DataSide, open_side
from k3quant.eval.divergence import check_comparable
from k3quant.eval.executor import finish, walk_layers
from k3quant.eval.finite import check_finite
from k3quant.eval.head import negative_log_likelihood
from k3quant.eval.head_pair import PairScores, score_pair
from k3quant.eval.kl_summary import percentile
from k3quant.eval.memory import plan_passes
from k3quant.eval.settings import EvalSettings
from k3quant.eval.windows import Window
from k3quant.progress import SILENT, Progress


def evaluate_data(
    checkpoint: Path,
    data: Path,
    *,
    reference: Path | None = None,
    settings: EvalSettings | None = None,
    progress: Progress = SILENT,
) -> DataResult:
    """Score lines of text and media, and with a reference beside it if asked.

    Args:
        checkpoint: Folder of the checkpoint.
        data: The JSON Lines file, see `data_lines`.
        reference: Folder of a checkpoint to compare with.
        settings: How; `ctx`, `stride` and `bos` have no meaning, as a line is one window.
        progress: Is told about each layer.

    Raises:
        UsageError: A context, stride or BOS is asked for, or a conversation is not on record.
        IncompleteError: Nothing to score, or something is missing or short.
        SchemaError: Config, tensors, media or lines do not agree.
        ValuesError: A value is NaN or infinite; names where, and the tensor.
        RefusedError: A text model is given media, or the reference is of another shape.
        ResourceError: A read failed, or the memory budget is too small.
    """
    started = time.perf_counter()
    settings = settings or EvalSettings()
    if settings.stride is not None or settings.bos or settings.ctx != EvalSettings().ctx:
        raise UsageError(
            "eval: expected neither ctx, stride nor bos with lines of text and media",
            hint="a line is one window of its own",
        )
    folders = [checkpoint] if reference is None else [checkpoint, reference]
    sides = [open_side(folder, data, settings, share=len(folders)) for folder in folders]
    for other in sides[1:]:
        _check_comparable(sides[0], other)
    lines = sides[0].lines
    _check_lines(lines, data, sides[0])
    scorer = _Scorer(sides, progress)
    passes = list(_passes(lines, sides, settings))
    progress.start("eval", len(passes) * len(sides) * _num_layers(sides[0]), "layers")
    for together in passes:
        scorer.score(together)
    subject = sides[0].subject
    return DataResult(
        settings=settings,
        lines=tuple(scorer.scores),
        media=sum(len(line.segments) for line in lines),
        tokens_sha256=subject.tokens_sha256,
        tokenizer_sha256=sides[0].tokenizer.digest,
        seconds=time.perf_counter() - started,
        bytes_read=sum(side.bytes_read for side in sides),
        divergence=scorer.divergence(),
    )


class _Scorer:
    """Scores groups of lines and keeps what they add up to."""

    def __init__(self, sides: Sequence[DataSide], progress: Progress) -> None:
        self.scores: list[LineScore] = []
        self._sides = sides
        self._progress = progress
        self._pairs: list[PairScores] = []
        self._features = Sums()
        self._meter: DataMeter | None = None
        if len(sides) == 2:
            self._meter = DataMeter(candidate=sides[0].model, reference=sides[1].model)

    def score(self, places: range) -> None:
        """Run the lines at some places through all layers, and score them."""
        groups = [side.lines[places.start : places.stop] for side in self._sides]
        features = [
            side.features(lines, progress=self._progress)
            for side, lines in zip(self._sides, groups, strict=True)
        ]
        streams = [
            side.stream(lines, seen)
            for side, lines, seen in zip(self._sides, groups, features, strict=True)
        ]
        lines = groups[0]
        rows, targets = _scored_rows(lines)
        if self._meter is None:
            nll, kld = self._score_alone(lines, streams[0], rows, targets), None
        else:
            self._add_features(features)
            pair = self._score_pair(self._meter, lines, streams, rows, targets)
            self._pairs.append(pair)
            nll, kld = pair.candidate_nll, pair.kld
        self._keep(lines, nll, kld)

    def divergence(self) -> DataDivergence | None:
        """Return what all groups found together."""
        if self._meter is None:
            return None
        kld = torch.cat([pair.kld for pair in self._pairs])
        kinds = self._meter.result()
        seen = KINDS.index("media")
        return DataDivergence(
            kld_mean=float(kld.mean()),
            kld_p99=percentile(kld, 0.99),
            top1_agreement=float(
                torch.cat([pair.same_top1 for pair in self._pairs]).double().mean()
            ),
            reference_nll_mean=float(torch.cat([p.reference_nll for p in self._pairs]).mean()),
            features=self._features.result(seen, -1) if kinds["media"].tokens else None,
            kinds=kinds,
        )

    def _score_alone(
        self, lines: Sequence[DataLine], stream: Tensor, rows: Tensor, targets: Tensor
    ) -> Tensor:
        model, inputs = self._sides[0].model, [line.ids for line in lines]
        walk = walk_layers(model, inputs, progress=self._progress, embedding=stream)
        residual = deque(walk, maxlen=1)[0]
        hidden = finish(model, residual, rows=rows)
        nll = negative_log_likelihood(hidden, targets, model.head_blocks())
        check_finite(nll, model, None, "lm_head")
        return nll

    def _score_pair(
        self,
        meter: DataMeter,
        lines: Sequence[DataLine],
        streams: Sequence[Tensor],
        rows: Tensor,
        targets: Tensor,
    ) -> PairScores:
        ours, theirs = self._sides[0].model, self._sides[1].model
        is_media = torch.from_numpy(np.concatenate([line.is_media for line in lines]))
        last = meter.walk(
            [line.ids for line in lines],
            candidate=streams[0],
            reference=streams[1],
            kinds=is_media.long(),
            progress=self._progress,
        )
        pair = score_pair(
            finish(theirs, last[1], rows=rows),
            finish(ours, last[0], rows=rows),
            targets,
            theirs.head_blocks(),
            ours.head_blocks(),
        )
        check_finite(pair.reference_nll, theirs, None, "lm_head of the reference")
        check_finite(pair.candidate_nll, ours, None, "lm_head")
        return pair

    def _add_features(self, features: Sequence[Tensor | None]) -> None:
        ours, theirs = features
        if ours is not None and theirs is not None:
            kinds = torch.full((len(ours),), KINDS.index("media"), device=ours.device)
            self._features.add(theirs, ours, kinds)

    def _keep(self, lines: Sequence[DataLine], nll: Tensor, kld: Tensor | None) -> None:
        counts = [int(line.scored.sum()) for line in lines]
        nlls = torch.split(nll.cpu(), counts)
        klds = [None] * len(lines) if kld is None else torch.split(kld.cpu(), counts)
        for line, own_nll, own_kld in zip(lines, nlls, klds, strict=True):
            media_tokens = int(line.is_media.sum())
            self.scores.append(
                LineScore(
                    number=line.number, tokens=len(line.ids), media_tokens=media_tokens,
                    nll=own_nll, kld=own_kld,
                )
            )  # fmt: skip


def _num_layers(side: DataSide) -> int:
    return side.model.config.num_hidden_layers


def _scored_rows(lines: Sequence[DataLine]) -> tuple[Tensor, Tensor]:
    """Return the tokens before scored ones, counted through all lines, and the scored ids."""
    ids = np.concatenate([line.ids for line in lines])
    targets = np.flatnonzero(np.concatenate([line.scored for line in lines]))
    return torch.from_numpy(targets - 1), torch.from_numpy(ids[targets])


def _passes(
    lines: Sequence[DataLine], sides: Sequence[DataSide], settings: EvalSettings
) -> Iterator[range]:
    """Yield the places of lines that fit the memory budget together."""
    nothing = np.empty(0, dtype=np.int64)
    windows = [Window(inputs=line.ids, targets=nothing) for line in lines]
    first = 0
    for together in plan_passes(
        windows,
        sides[0].model.config,
        ram_bytes=settings.pass_bytes,
        ahead_bytes=settings.ahead_bytes,
        walks=len(sides),
    ):
        yield range(first, first + len(together))
        first += len(together)


def _check_lines(lines: Sequence[DataLine], data: Path, side: DataSide) -> None:
    if not any(line.scored.any() for line in lines):
        raise IncompleteError(
            f"{data.name}: nothing to score: expected a line with text after its first id, got "
            f"{len(lines)} lines without",
            hint="the first id of a line is never scored, nor what belongs to media",
        )
    limit = side.model.config.max_position_embeddings
    for line in lines:
        if limit is not None and len(line.ids) > limit:
            raise SchemaError(
                f"{data.name}, line {line.number}: expected at most {limit} ids, got "
                f"{len(line.ids)}"
            )


def _check_comparable(candidate: DataSide, reference: DataSide) -> None:
    check_comparable(candidate.subject, reference.subject)
    if candidate.vision is not None and candidate.settings != reference.settings:
        raise RefusedError(
            f"{candidate.folder}: expected the reference's picture settings, got others",
            hint="compare checkpoints of the same model, with the same preprocessor_config.json",
        )
