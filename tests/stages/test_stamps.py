"""Stamps differ when a module may give other outputs, agree otherwise, and hold no weights."""

import copy
import gc
import weakref

import pytest
import torch
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from dit_accel.stages.stamps import BUFFER_SAMPLES, SAMPLES, Stamps
from tests.tiny import encoders


def encoder_of():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return encoders.llama()["text_encoder"].eval()


def ids():
    return torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def _quantize(encoder):
    quantize_(encoder, Int8WeightOnlyConfig())


def _cast(encoder):
    apply_layerwise_casting(encoder, torch.float8_e4m3fn, torch.float32)


def _offload_groups(encoder):
    where = torch.device("cpu")
    apply_group_offloading(encoder, where, where, offload_type="leaf_level")


@torch.no_grad()
@pytest.mark.parametrize("form", [_quantize, _cast, _offload_groups], ids=lambda form: form.__name__.strip("_"))
def test_other_forms_of_weights_have_stamps(form):
    """A run changes none, and a written weight does."""
    encoder, stamps = encoder_of(), Stamps()
    form(encoder)
    first = stamps.read(encoder)
    assert not isinstance(first, str), first
    assert first.is_offloaded == (form is not _quantize)
    encoder(ids())
    assert stamps.read(encoder) == first
    norm = next(module for module in encoder.modules() if hasattr(module, "variance_epsilon"))
    norm.weight.data = 2 * norm.weight.data
    assert stamps.read(encoder) != first


@torch.no_grad()
def test_quantised_data_counts():
    encoder, stamps = encoder_of(), Stamps()
    _quantize(encoder)
    first = stamps.read(encoder)
    weight = next(module for module in encoder.modules() if isinstance(module, nn.Linear)).weight
    getattr(weight, weight.__tensor_flatten__()[0][0]).neg_()
    assert stamps.read(encoder) != first


class Held(nn.Module):
    """A module that holds one weight or buffer."""

    def __init__(self, name, weight):
        super().__init__()
        if name == "weight":
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer(name, weight)
        self.eval()


Held.__module__ = "torch.nn"  # otherwise its code is not known

WEIGHTS = {
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(1.0),
    "small": torch.randn(SAMPLES - 1),
    "just-more": torch.randn(SAMPLES + 1),
    "matrix": torch.randn(37, 53),
    "transposed": torch.randn(37, 53).t(),
    "expanded": torch.ones(1).expand(1000),
    "float8": torch.randn(64, 3).to(torch.float8_e4m3fn),
    "bool": torch.rand(100) > 0.5,
    "complex": torch.randn(40, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_read_of_any_weight(name):
    module = Held("buffer", WEIGHTS[name].clone() if name != "expanded" else WEIGHTS[name])
    stamps = Stamps()
    assert not isinstance(first := stamps.read(module), str)
    assert stamps.read(module) == first


@pytest.mark.parametrize("size", [1, SAMPLES - 1, SAMPLES, SAMPLES + 1, 3 * SAMPLES, 1000])
def test_a_write_to_all_values_shows(size):
    """Though no version counter has changed."""
    module, stamps = Held("weight", torch.randn(size)), Stamps()
    first = stamps.read(module)
    module.weight.data += 1
    assert module.weight._version == 0 and stamps.read(module) != first


def test_buffers_count_whole():
    """One value of thousands, also as a new tensor of an offloaded module."""
    module, stamps = Held("table", torch.zeros(BUFFER_SAMPLES)), Stamps()
    first = stamps.read(module)
    module.table.data[1234] = 1
    assert stamps.read(module) != first


def test_new_weights_at_an_old_address_show():
    """The identity of a weight counts, not its id, which Python uses again."""
    module, stamps = Held("weight", torch.zeros(5)), Stamps()
    seen = {stamps.read(module).key}
    for _ in range(20):
        del module.weight
        module.weight = nn.Parameter(torch.zeros(5))
        seen.add(stamps.read(module).key)
    assert len(seen) == 21


def test_weights_are_not_kept():
    encoder, stamps = encoder_of(), Stamps()
    first = stamps.read(encoder)
    weights = [weakref.ref(weight) for weight in encoder.parameters()]
    assert stamps.read(copy.deepcopy(encoder)) != first
    del encoder
    gc.collect()
    assert not any(weight() is not None for weight in weights)
