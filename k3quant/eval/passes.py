"""Runs groups of windows through all walkers, scores them, and keeps a state that outlives a crash.

Legend: n scored ids of a pass.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3quant.eval.executor import finish, scored_rows
from k3quant.eval.finite import check_finite
from k3quant.eval.head import negative_log_likelihood
from k3quant.eval.head_pair import PairScores, score_pair
from k3quant.eval.hidden_file import HiddenWriter
from k3quant.eval.layer_meter import LayerMeter
from k3quant.eval.lockstep import CANDIDATE, REFERENCE, TWIN, Step, Walker, walk_together
from k3quant.eval.walk_state import SUMS, WalkState
from k3quant.eval.windows import Window
from k3quant.models.residual import Residual
from k3quant.progress import SILENT, Progress

HIDDEN = "hidden"


@dataclass(slots=True, kw_only=True)
class PassRunner:
    """Runs one pass after the other.

    Attributes:
        walkers: The candidate, and with a reference that and its twin.
        meter: Takes the layers of a comparison; None without a reference.
        state: Keeps what is done; None keeps nothing.
        hidden: Receives what lm_head reads; None drops it.
        progress: Is told about each layer.
        resumed_after: Layer after which a saved state was taken up; None where none was.
    """

    walkers: Mapping[str, Walker]
    meter: LayerMeter | None = None
    state: WalkState | None = None
    hidden: HiddenWriter | None = None
    progress: Progress = SILENT
    resumed_after: int | None = field(default=None, init=False)

    def run(self, number: int, windows: Sequence[Window]) -> dict[str, Tensor]:
        """Run a pass, or take its scores from the saved state.

        Args:
            number: 0-based pass.
            windows: Its windows.

        Returns:
            `[n]` on the processor: `nll`, and in a comparison `kld`, `same_top1`, `confidence`,
            `reference_nll`, with a twin also `twin_kld` and `twin_same_top1`.

        Raises:
            ValuesError: A value is NaN or infinite.
        """
        rows, targets = scored_rows(windows)
        scores = self.state.finished(number) if self.state else None
        if scores is not None:
            self._restore(scores.pop(SUMS), self._num_layers - 1)
        else:
            residuals = self._walk(number, windows)
            hidden = {
                name: finish(walker.model, residuals.pop(name), rows=rows)
                for name, walker in self.walkers.items()
            }
            scores = self._score(hidden, targets)
            if self.hidden is not None:
                scores[HIDDEN] = hidden[CANDIDATE]
            if self.state is not None:
                self.state.finish(number, scores, sums=self._sums)
        if self.hidden is not None:
            self.hidden.add(scores.pop(HIDDEN), targets)
        return scores

    @property
    def _num_layers(self) -> int:
        return self.walkers[CANDIDATE].model.config.num_hidden_layers

    @property
    def _sums(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64) if self.meter is None else self.meter.totals

    def _restore(self, sums: Tensor, layer: int) -> None:
        if self.meter is not None:
            self.meter.totals = sums
        self.resumed_after = layer
        self.progress.advance((layer + 1) * len(self.walkers))

    def _walk(self, number: int, windows: Sequence[Window]) -> dict[str, Residual]:
        inputs = [window.inputs for window in windows]
        tokens = sum(map(len, inputs))
        saved = self.state.begun(number) if self.state else None
        if saved is not None:
            self._restore(saved.sums, saved.beginning.layer - 1)
        walk = walk_together(
            self.walkers,
            inputs,
            beginning=saved.beginning if saved else None,
            progress=self.progress,
        )
        del saved
        with closing(walk) as steps:
            step: Step = next(steps)
            for step in steps:
                if self.meter is not None:
                    self.meter.add(step)
                if self.state is not None:
                    residuals, layer = step.residuals, step.layer
                    self.state.save(number, layer, residuals, tokens=tokens, sums=self._sums)
            return step.residuals

    def _score(self, hidden: Mapping[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
        ours = self.walkers[CANDIDATE].model
        if REFERENCE not in self.walkers:
            nll = negative_log_likelihood(hidden[CANDIDATE], targets, ours.head_blocks())
            check_finite(nll, ours, None, "lm_head")
            return {"nll": nll}
        pair = self._pair(hidden, targets, CANDIDATE)
        check_finite(pair.candidate_nll, ours, None, "lm_head")
        scores = {
            "nll": pair.candidate_nll,
            "kld": pair.kld,
            "same_top1": pair.same_top1,
            "confidence": pair.confidence,
            "reference_nll": pair.reference_nll,
        }
        if TWIN in self.walkers:
            twin = self._pair(hidden, targets, TWIN)
            scores |= {"twin_kld": twin.kld, "twin_same_top1": twin.same_top1}
        return scores

    def _pair(self, hidden: Mapping[str, Tensor], targets: Tensor, name: str) -> PairScores:
        reference, other = self.walkers[REFERENCE].model, self.walkers[name].model
        pair = score_pair(
            hidden[REFERENCE],
            hidden[name],
            targets,
            reference.head_blocks(),
            other.head_blocks(),
        )
        check_finite(pair.reference_nll, reference, None, "lm_head of the reference")
        return pair
