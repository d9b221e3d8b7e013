"""A checkpoint that reads text and media: its model, tower, tokenizer and picture settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3quant.checkpoint.reader import open_checkpoint, read_json
from k3quant.errors import SchemaError
from k3quant.eval.data_lines import MEDIA_PAD, DataLine, read_lines
from k3quant.eval.divergence import Subject
from k3quant.eval.media_features import media_features
from k3quant.eval.media_weights import VisionWeights
from k3quant.eval.perplexity import OpenModel, open_model
from k3quant.eval.settings import EvalSettings
from k3quant.eval.tokens import digest_ids
from k3quant.media.settings import PREPROCESSOR_FILE, MediaSettings, check_settings, read_settings
from k3quant.models.tokenizer import Tokenizer
from k3quant.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class DataSide:
    """A checkpoint with the lines as it reads them.

    Attributes:
        folder: Its folder.
        model: Its language model.
        vision: Its tower; None for a text model, or where no line has media.
        settings: How it cuts pictures; None for a text model.
        tokenizer: Its tokenizer.
        lines: The lines.
    """

    folder: Path
    model: OpenModel
    vision: VisionWeights | None
    settings: MediaSettings | None
    tokenizer: Tokenizer = field(repr=False)
    lines: tuple[DataLine, ...] = field(repr=False)

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read so far."""
        return self.model.bytes_read + (self.vision.bytes_read if self.vision else 0)

    @property
    def subject(self) -> Subject:
        """What a comparison must agree on."""
        return Subject(
            label=str(self.folder),
            config=self.model.config,
            tokens_sha256=digest_ids([line.ids for line in self.lines]),
            tokenizer_sha256=self.tokenizer.digest,
        )

    def features(self, lines: Sequence[DataLine], *, progress: Progress = SILENT) -> Tensor | None:
        """Return the features of some lines' media, one behind the other.

        Returns:
            `[tokens, D]`, None where the lines have no media.

        Raises:
            SchemaError: A medium does not fit the tower.
            ValuesError: A value is NaN or infinite.
            K3QuantError: A picture is gone or broken.
        """
        segments = [segment for line in lines for segment in line.segments]
        if self.vision is None or not segments:
            return None
        return torch.cat(list(media_features(self.vision, segments, progress=progress)))

    def stream(self, lines: Sequence[DataLine], features: Tensor | None) -> Tensor:
        """Return what the first layer reads: embedding rows, and features where media stand.

        Args:
            lines: Some lines.
            features: Their media's, as `features` gives them.

        Returns:
            `[N, D]`.
        """
        ids = torch.from_numpy(np.concatenate([line.ids for line in lines]))
        places = torch.from_numpy(np.concatenate([line.is_media for line in lines]))
        return splice(self.model.embed(ids), places, features)


def splice(embedding: Tensor, places: Tensor, features: Tensor | None) -> Tensor:
    """Put features in the place of embedding rows.

    Args:
        embedding: `[N, D]`.
        places: `[N]` bool, where media stand.
        features: `[places, D]`; None where there are none.

    Returns:
        `[N, D]` in the embedding's dtype.

    Raises:
        ValueError: Another number of features than places.
    """
    count = 0 if features is None else len(features)
    if count != int(places.sum()):
        raise ValueError(f"features: expected {int(places.sum())}, got {count}")
    if features is None:
        return embedding
    spliced = embedding.clone()
    spliced[places.to(embedding.device)] = features.to(embedding)
    return spliced


def open_side(folder: Path, data: Path, settings: EvalSettings, *, share: int) -> DataSide:
    """Open a checkpoint and read the lines with its tokenizer and settings.

    Args:
        folder: The checkpoint's folder.
        data: The JSON Lines file.
        settings: Dtype, device and reading.
        share: Walks that divide what is read ahead.

    Raises:
        SchemaError: Config and tokenizer disagree about the id of media.
        K3QuantError: As `open_checkpoint`, `read_settings` and `read_lines`.
    """
    checkpoint = open_checkpoint(folder)
    model = open_model(checkpoint, settings, share=share)
    tokenizer = Tokenizer.load(folder)
    media: MediaSettings | None = None
    if model.config.vision is not None:
        media = read_settings(read_json(checkpoint.source, PREPROCESSOR_FILE))
        check_settings(media, model.config.vision)
    lines = read_lines(data, tokenizer, settings=media)
    vision: VisionWeights | None = None
    if any(line.segments for line in lines):
        media_id = model.config.media_placeholder_token_id
        if media_id != tokenizer.specials[MEDIA_PAD]:
            raise SchemaError(
                f"config.json: expected the tokenizer's {MEDIA_PAD} "
                f"{tokenizer.specials[MEDIA_PAD]} as media_placeholder_token_id, got {media_id}"
            )
        device = torch.device(settings.device)
        vision = VisionWeights(checkpoint, model.config, dtype=model.dtype, device=device)
    return DataSide(
        folder=folder,
        model=model,
        vision=vision,
        settings=media,
        tokenizer=tokenizer,
        lines=lines,
    )
