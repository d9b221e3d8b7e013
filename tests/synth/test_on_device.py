import numpy as np
import pytest
import torch

from k3quant.errors import ResourceError
from k3quant.models.k3_config import read_config
from k3quant.models.k3_tensors import layer_tensors
from k3quant.synth.on_device import DeviceValues
from k3quant.synth.stream import Stream
from k3quant.synth.values import values_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "count"), [(0, 100_000), (3, 1), (12_345, 4_321), (90, 60)])
@pytest.mark.parametrize("role", ["expert.w1", "expert.w2", "kda.q_proj", "kda.A_log", "moe.gate"])
def test_values_are_those_of_the_processor(k3_config, device, role, first, count):
    config = read_config(k3_config)
    made = DeviceValues(torch.device(device))
    specs = [spec for spec in layer_tensors(config, 1, packed=True) if spec.role == role][:2]
    for spec in specs:
        values, stream = values_of(spec, config), Stream.of(7, spec.name)
        expected = values.fill(stream, first, count)
        assert np.array_equal(made.fill(values, stream, first, count), expected)


def test_a_machine_without_the_device_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="expected a CUDA device, got none"):
        DeviceValues(torch.device("cuda"))
