"""The released layout as bytes: each shard's header and the index, predicted from a config.

Layers of one kind differ in nothing but their number, so one header a kind is encoded and the
others are made by substitution. A file whose header equals the prediction needs no parsing: every
name, dtype, shape and offset in it is the table's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from k3quant.checkpoint.header import LENGTH_BYTES, encode_header
from k3quant.models.k3_config import K3Config
from k3quant.models.k3_tensors import num_shards, shard_name, shard_tensors


@dataclass(frozen=True, slots=True)
class PredictedShard:
    """One file as the released layout has it.

    Attributes:
        name: File name.
        header: Length bytes and padded JSON.
        tensor_bytes: Bytes of the data section.
        num_tensors: Tensors in the file.
    """

    name: str
    header: bytes
    tensor_bytes: int
    num_tensors: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.tensor_bytes


@dataclass(frozen=True, slots=True)
class _Template:
    """A file with its numbers cut out: joining the pieces again is faster than replacing.

    `text` is the JSON without padding, cut at each layer number; `index_lines` are cut at layer
    number and file name in turn.
    """

    text: list[bytes]
    index_lines: list[bytes]
    first_name: str
    tensor_bytes: int
    num_tensors: int

    def header_text(self, layer: int) -> bytes:
        return (b".layers.%d." % layer).join(self.text)

    def index_text(self, layer: int, file: bytes) -> bytes:
        if len(self.text) == 1:  # no layer number in any name
            return file.join(self.index_lines)
        pieces = self.index_lines.copy()
        pieces[1::4] = [b".layers.%d." % layer] * len(pieces[1::4])
        pieces[3::4] = [file] * len(pieces[3::4])
        return b"".join(pieces)


@dataclass(slots=True)
class ReleasedLayout:
    """Predicts files of one config; templates are made on first use.

    Attributes:
        config: The config.
        packed: Whether routed experts are MXFP4 pairs.
    """

    config: K3Config
    packed: bool
    _templates: dict[tuple[object, ...], _Template] = field(default_factory=dict)

    def shard(self, number: int) -> PredictedShard:
        """Return one file, by its 1-based number."""
        template = self._template(number)
        text = template.header_text(number - 1)
        padding = b" " * (-len(text) % 8)
        length = len(text) + len(padding)
        return PredictedShard(
            shard_name(self.config, number),
            b"".join((length.to_bytes(LENGTH_BYTES, "little"), text, padding)),
            template.tensor_bytes,
            template.num_tensors,
        )

    def shards(self) -> Iterator[PredictedShard]:
        """Yield all files in order."""
        for number in range(1, num_shards(self.config) + 1):
            yield self.shard(number)

    def index(self) -> bytes:
        """Return the index as `encode_index` writes it: sorted names, two spaces, total_size."""
        return b"".join(self.index_pieces())

    def index_pieces(self) -> Iterator[bytes]:
        """Yield the index in pieces, so that it can be compared without being put together."""
        config, layers = self.config, self.config.num_hidden_layers
        blocks: list[tuple[str, bytes]] = []
        total = 0
        for number in range(1, num_shards(config) + 1):
            template = self._template(number)
            total += template.tensor_bytes
            lines = template.index_text(number - 1, shard_name(config, number).encode())
            if number <= layers:
                blocks.append((template.first_name.replace("#", str(number - 1), 1), lines))
                continue
            # Globals stand before and after the layers; each line finds its own place.
            alone = lines.splitlines(keepends=True)
            blocks += [(line.split(b'"', 2)[1].decode(), line) for line in alone]
        blocks.sort()
        yield b'{\n  "metadata": {\n    "total_size": %d\n  },\n  "weight_map": {\n' % total
        for _, lines in blocks[:-1]:
            yield lines
        yield blocks[-1][1].removesuffix(b",\n") + b"\n  }\n}"

    def _template(self, number: int) -> _Template:
        layer = number - 1
        key: tuple[object, ...] = ("shard", number)
        if layer < self.config.num_hidden_layers:
            key = ("layer", self.config.layer_kinds[layer], self.config.is_moe(layer))
        found = self._templates.get(key)
        if found is None:
            specs = shard_tensors(self.config, number, packed=self.packed)
            header, placed = encode_header((s.name, s.dtype, s.shape) for s in specs)
            mark = b".layers.%d." % layer
            names = sorted(placed)
            found = self._templates[key] = _Template(
                text=header[LENGTH_BYTES:].rstrip(b" ").split(mark),
                index_lines=_cut_lines(names, mark),
                first_name=names[0].replace(f".layers.{layer}.", ".layers.#."),
                tensor_bytes=max(entry.end for entry in placed.values()),
                num_tensors=len(placed),
            )
        return found


def _cut_lines(names: list[str], mark: bytes) -> list[bytes]:
    """Return index lines cut at layer and file, with empty places for both where a name has one."""
    pieces: list[bytes] = [b""]
    for name in names:
        head, found, tail = name.encode().partition(mark)
        pieces[-1] += b'    "' + head
        if found:
            pieces += [b"", tail + b'": "', b"", b'",\n']
        else:
            pieces[-1] += b'": "'
            pieces.append(b'",\n')
    return pieces
