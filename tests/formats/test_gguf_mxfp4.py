import pytest
import torch

from k3quant.errors import SchemaError
from k3quant.formats.gguf_mxfp4 import pack_gguf_mxfp4, unpack_gguf_mxfp4


def test_block_is_scale_then_split_halves():
    packed = torch.tensor(list(bytes.fromhex("1032547698badcfe" * 2)), dtype=torch.uint8)[None]
    block = pack_gguf_mxfp4(packed, torch.tensor([[0x7F]], dtype=torch.uint8))
    assert bytes(block[0].tolist()).hex() == "7f00112233445566778899aabbccddeeff"


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96), (32,), (0, 32)], ids=str)
def test_blocks_come_back_byte_for_byte(shape):
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    scale = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8)
    blocks = pack_gguf_mxfp4(packed, scale)
    assert blocks.shape == (*shape[:-1], shape[-1] // 32 * 17)
    again = unpack_gguf_mxfp4(blocks)
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


def test_halves_of_different_elements_do_not_mix():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 8] = 0x5A  # elements 16 and 17
    block = pack_gguf_mxfp4(packed, torch.zeros(1, 1, dtype=torch.uint8))
    assert block[0, 1:3].tolist() == [0xA0, 0x50]


def test_broken_blocks_are_refused():
    with pytest.raises(SchemaError, match="row bytes: expected a multiple of 17, got 16"):
        unpack_gguf_mxfp4(torch.zeros(2, 16, dtype=torch.uint8))


def test_scale_grid_that_would_broadcast_is_refused():
    with pytest.raises(SchemaError, match=r"expected \[4, 2\], got \[4, 1\]"):
        pack_gguf_mxfp4(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8))
