"""A walk through the layers whose weights arrive in memory, or on a device, while it computes."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Condition

import torch
from torch import Tensor

from k3quant.checkpoint.folder import LocalFolder
from k3quant.checkpoint.reader import Checkpoint
from k3quant.errors import K3QuantError
from k3quant.eval.stored import StoredTensors, exact_roles, place_name
from k3quant.eval.weights import StoredPart, decode_weights
from k3quant.models.k3_tensors import TensorSpec
from k3quant.stream.budget import PIECE_BYTES, Budget
from k3quant.stream.chunks import Chunk, expert_chunk, own_chunk
from k3quant.stream.files import OpenFiles, outgrows_memory
from k3quant.stream.reader import ChunkReader, Loaded

# Tokens a chosen expert must have on average for every expert to be read without waiting.
CROWD = 4


class WeightWalk:
    """Gives a layer's own weights, then its experts in chunks, layer after layer."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: StoredTensors,
        *,
        first: int,
        dtype: torch.dtype,
        device: torch.device,
        budget: Budget,
        own_bytes: int,
        expert_bytes: int,
        threads: int,
        tokens: int,
    ) -> None:
        """Start reading.

        Args:
            checkpoint: The checkpoint.
            stored: Its tensors.
            first: Layer to begin with.
            dtype: Dtype of the activations.
            device: Where to.
            budget: Arenas.
            own_bytes: Bytes of the largest layer's own tensors, as chunks lay them out.
            expert_bytes: Bytes of an expert.
            threads: Reads at a time.
            tokens: Tokens of the walk. Where there are many, every expert is read, in file order
                and ahead of time; otherwise only those that some token chose, once that is known.
        """
        self._checkpoint = checkpoint
        self._stored = stored
        self._dtype = dtype
        self._chunk_experts = budget.chunk_experts
        moe = stored.config.moe
        self._all = tokens * moe.num_experts_per_token >= CROWD * moe.num_experts
        self._choice = Condition()
        self._chosen: dict[int, Sequence[int]] = {}
        self._closed = False
        self._held: Loaded | None = None
        layers = range(first, stored.config.num_hidden_layers)
        self._reader = ChunkReader(
            self._chunks(layers),
            _Origin(checkpoint, stored, device, threads),
            device=device,
            own_arenas=budget.own_arenas,
            own_bytes=own_bytes,
            expert_arenas=budget.expert_arenas,
            expert_bytes=budget.chunk_experts * expert_bytes,
            threads=threads,
        )

    def __enter__(self) -> "WeightWalk":
        return self

    def __exit__(self, *_: object) -> None:
        with self._choice:
            self._closed = True
            self._choice.notify_all()
        self._reader.close()
        self._held = None

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """Return a layer's own weights by role; they are gone when the next layer's are asked for.

        Raises:
            K3QuantError: A read failed, or a value cannot be decoded.
        """
        if self._held is not None:
            self._reader.release(self._held)
        with self._choice:  # whoever did not ask for the last layer's experts needs none
            self._chosen.setdefault(layer - 1, ())
            self._choice.notify_all()
        self._held = loaded = self._take(layer)
        own = [spec for spec in self._stored.layer_specs(layer) if spec.expert is None]
        return decode_weights(
            parts_of(loaded, None),
            dtype=self._dtype,
            exact=exact_roles(own),
            where=place_name(layer, None),
        )

    def experts(
        self, layer: int, wanted: Sequence[int]
    ) -> Generator[Mapping[str, Tensor], None, None]:
        """Yield the weights of some experts, ascending, one at a time.

        Each is gone when the next is asked for.

        Raises:
            K3QuantError: A read failed, or a value cannot be decoded.
        """
        chosen = frozenset(wanted)
        for loaded in self.chunks(layer, torch.tensor(wanted)) if wanted else ():
            try:
                for expert in (e for e in loaded.chunk.experts if e in chosen):
                    yield decode_weights(
                        parts_of(loaded, expert),
                        dtype=self._dtype,
                        where=place_name(layer, expert),
                    )
            finally:
                self.release(loaded)

    def chunks(self, layer: int, wanted: Tensor) -> Iterator[Loaded]:
        """Yield a layer's chunks of experts, ascending.

        Args:
            layer: 0-based layer.
            wanted: Experts that some token chose; only they are needed.
        """
        if self._all:
            groups = self._groups(range(self._stored.config.moe.num_experts))
        else:
            chosen: list[int] = torch.unique(wanted).tolist()
            with self._choice:
                self._chosen[layer] = chosen
                self._choice.notify_all()
            groups = self._groups(chosen)
        for _ in groups:
            yield self._take(layer)

    def release(self, loaded: Loaded) -> None:
        """Give a chunk of experts back."""
        self._reader.release(loaded)

    def _take(self, layer: int) -> Loaded:
        loaded = self._reader.take()
        if loaded.chunk.layer != layer:
            raise ValueError(f"walk: expected layer {loaded.chunk.layer} next, got {layer}")
        return loaded

    def _groups(self, experts: Sequence[int]) -> list[Sequence[int]]:
        step = self._chunk_experts
        return [experts[first : first + step] for first in range(0, len(experts), step)]

    def _chunks(self, layers: range) -> Iterator[Chunk]:
        for layer in layers:
            own: list[TensorSpec] = []
            experts: dict[int, list[TensorSpec]] = {}
            for spec in self._stored.layer_specs(layer):
                if spec.expert is None:
                    own.append(spec)
                else:
                    experts.setdefault(spec.expert, []).append(spec)
            yield own_chunk(self._checkpoint, layer, own, piece_bytes=PIECE_BYTES)
            if not experts:
                continue
            for group in self._groups(sorted(experts) if self._all else self._wait_for(layer)):
                some = {expert: experts[expert] for expert in group}
                yield expert_chunk(self._checkpoint, layer, some, piece_bytes=PIECE_BYTES)

    def _wait_for(self, layer: int) -> Sequence[int]:
        with self._choice:
            self._choice.wait_for(lambda: layer in self._chosen or self._closed)
            return self._chosen.pop(layer, ())


def parts_of(loaded: Loaded, expert: int | None) -> Mapping[str, Mapping[str, StoredPart]]:
    """Return the stored parts of an expert, or of the layer's own tensors, by role."""
    roles: dict[str, dict[str, StoredPart]] = {}
    for (role, part), place in loaded.chunk.places[expert].items():
        data = loaded.data[place.start : place.start + place.length]
        roles.setdefault(role, {})[part] = StoredPart(place.name, place.dtype, place.shape, data)
    return roles


def largest_chunks(checkpoint: Checkpoint, stored: StoredTensors) -> tuple[int, int]:
    """Return the bytes of the largest layer's own tensors and of the largest expert."""
    own = expert = 0
    for layer in range(stored.config.num_hidden_layers):
        specs = stored.layer_specs(layer)
        mine = [spec for spec in specs if spec.expert is None]
        first = [spec for spec in specs if spec.expert == 0]
        chunk = own_chunk(checkpoint, layer, mine, piece_bytes=PIECE_BYTES)
        own = max(own, chunk.num_bytes)
        if first:
            alone = expert_chunk(checkpoint, layer, {0: first}, piece_bytes=PIECE_BYTES)
            expert = max(expert, alone.num_bytes)
    return own, expert


class _Origin:
    """A checkpoint as what pieces are read from."""

    def __init__(
        self, checkpoint: Checkpoint, stored: StoredTensors, device: torch.device, threads: int
    ) -> None:
        self._source = checkpoint.source
        self._entries = checkpoint.entries
        self._stored = stored
        num_bytes = sum(entry.length for entry in checkpoint.entries.values())
        self.files = OpenFiles(
            _root(checkpoint),
            keep=not outgrows_memory(num_bytes),
            whole_pages=device.type == "cuda",
            at_once=threads,
        )

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        try:
            self._source.read_into(file, offset, buffer)
        except K3QuantError as error:
            message = f"{error.message}, reading tensor {self._tensor_at(file, offset)}"
            raise type(error)(message, hint=error.hint) from error

    def _tensor_at(self, file: str, offset: int) -> str:
        return next(
            name
            for name, entry in self._entries.items()
            if entry.file == file and 0 <= offset - entry.offset < entry.length
        )

    def count(self, length: int) -> None:
        self._stored.count(length)


def _root(checkpoint: Checkpoint) -> Path:
    if not isinstance(checkpoint.source, LocalFolder):
        raise ValueError(f"{checkpoint.source.label}: expected a folder on this machine")
    return checkpoint.source.root
