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
    layer: int
    text: bytes  # JSON without padding
    tensor_bytes: int
    num_tensors: int
    index_lines: bytes


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
        text = self._renumber(template.text, template.layer, number - 1)
        text += b" " * (-len(text) % 8)
        return PredictedShard(
            shard_name(self.config, number),
            len(text).to_bytes(LENGTH_BYTES, "little") + text,
            template.tensor_bytes,
            template.num_tensors,
        )

    def shards(self) -> Iterator[PredictedShard]:
        """Yield all files in order."""
        for number in range(1, num_shards(self.config) + 1):
            yield self.shard(number)

    def index(self) -> bytes:
        """Return the index as `encode_index` writes it: sorted names, two spaces, total_size."""
        config, layers = self.config, self.config.num_hidden_layers
        blocks: list[tuple[str, bytes]] = []
        total = 0
        for number in range(1, num_shards(config) + 1):
            template = self._template(number)
            total += template.tensor_bytes
            lines = self._renumber(template.index_lines, template.layer, number - 1)
            lines = lines.replace(b"@FILE@", shard_name(config, number).encode())
            if number <= layers:
                blocks.append((lines.split(b'"', 2)[1].decode(), lines))
                continue
            # Globals stand before and after the layers; each line finds its own place.
            alone = lines.splitlines(keepends=True)
            blocks += [(line.split(b'"', 2)[1].decode(), line) for line in alone]
        blocks.sort()
        body = b"".join(lines for _, lines in blocks).removesuffix(b",\n")
        head = b'{\n  "metadata": {\n    "total_size": %d\n  },\n  "weight_map": {\n' % total
        return head + body + b"\n  }\n}"

    def _template(self, number: int) -> _Template:
        layer = number - 1
        key: tuple[object, ...] = ("shard", number)
        if layer < self.config.num_hidden_layers:
            key = ("layer", self.config.layer_kinds[layer], self.config.is_moe(layer))
        found = self._templates.get(key)
        if found is None:
            specs = shard_tensors(self.config, number, packed=self.packed)
            header, placed = encode_header((s.name, s.dtype, s.shape) for s in specs)
            found = self._templates[key] = _Template(
                layer=layer,
                text=header[LENGTH_BYTES:].rstrip(b" "),
                tensor_bytes=max(entry.end for entry in placed.values()),
                num_tensors=len(placed),
                index_lines=b"".join(
                    b'    "%s": "@FILE@",\n' % name.encode() for name in sorted(placed)
                ),
            )
        return found

    @staticmethod
    def _renumber(text: bytes, layer: int, wanted: int) -> bytes:
        return text.replace(b".layers.%d." % layer, b".layers.%d." % wanted)
