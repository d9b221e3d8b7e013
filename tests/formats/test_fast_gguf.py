import numpy as np
import pytest
import torch

from k3quant.errors import SchemaError
from k3quant.formats.fast_gguf import pack_to_gguf
from k3quant.formats.gguf_mxfp4 import pack_gguf_mxfp4


@pytest.mark.parametrize("shape", [(300, 2048), (2, 3, 32), (16,), (0, 16)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_are_the_references(shape, threads):
    rng = np.random.default_rng(5)
    packed = rng.integers(0, 256, shape, dtype=np.uint8)
    scale = rng.integers(0, 256, (*shape[:-1], shape[-1] // 16), dtype=np.uint8)
    theirs = pack_gguf_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale))
    assert np.array_equal(pack_to_gguf(packed, scale, threads=threads), theirs.numpy())


def test_every_byte_keeps_its_nibbles_in_every_place():
    packed = np.array([np.roll(np.arange(256, dtype=np.uint8), n) for n in range(16)])
    scale = np.arange(256, dtype=np.uint8).reshape(16, 16)
    theirs = pack_gguf_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale))
    assert np.array_equal(pack_to_gguf(packed, scale), theirs.numpy())


def test_output_goes_into_the_buffer_that_was_given():
    packed, scale = np.full((4, 32), 0x21, np.uint8), np.full((4, 2), 9, np.uint8)
    out = np.zeros((4, 34), np.uint8)
    assert pack_to_gguf(packed, scale, out=out) is out
    assert out[3, 17:].tolist() == [9, *[0x11, 0x22] * 8]
    with pytest.raises(ValueError, match=r"expected contiguous uint8 \[4, 34\]"):
        pack_to_gguf(packed, scale, out=np.zeros((4, 33), np.uint8))


def test_scale_grid_that_would_broadcast_is_refused():
    with pytest.raises(SchemaError, match=r"expected \[4, 2\], got \[4, 1\]"):
        pack_to_gguf(np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8))
