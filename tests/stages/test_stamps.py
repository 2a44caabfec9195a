"""Stamps differ when a module may give other outputs, agree otherwise, and hold no weights."""

import copy
import gc
import weakref

import pytest
import torch
from accelerate import cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from dit_accel.stages.stamps import BUFFER_SAMPLES, SAMPLES, read_stamp
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


@pytest.mark.parametrize("form", [_quantize, _cast, _offload_groups], ids=lambda form: form.__name__.strip("_"))
def test_other_forms_of_weights_have_stamps(form):
    """A run changes none, and a written weight does."""
    encoder = encoder_of()
    form(encoder)
    first = read_stamp(encoder)
    assert not isinstance(first, str), first
    assert first.is_offloaded == (form is not _quantize)
    encoder(ids())
    assert read_stamp(encoder) == first
    norm = next(module for module in encoder.modules() if hasattr(module, "variance_epsilon"))
    norm.weight.data = 2 * norm.weight.data
    assert read_stamp(encoder) != first


def test_quantised_data_counts():
    encoder = encoder_of()
    _quantize(encoder)
    first = read_stamp(encoder)
    weight = next(module for module in encoder.modules() if isinstance(module, nn.Linear)).weight
    getattr(weight, weight.__tensor_flatten__()[0][0]).neg_()
    assert read_stamp(encoder) != first


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
    assert not isinstance(first := read_stamp(module), str)
    assert read_stamp(module) == first


@pytest.mark.parametrize("size", [1, SAMPLES - 1, SAMPLES, SAMPLES + 1, 3 * SAMPLES, 1000])
def test_a_write_to_all_values_shows(size):
    """Though no version counter has changed."""
    module = Held("weight", torch.randn(size))
    first = read_stamp(module)
    module.weight.data += 1
    assert module.weight._version == 0 and read_stamp(module) != first


@pytest.mark.parametrize("rows, columns", [(16, 16), (17, 16), (33, 8), (64, 4), (20, 6)])
def test_a_write_to_a_column_shows(rows, columns):
    """Also if the number of columns is a power of two; a merged adapter may change a single feature."""
    module = Held("weight", torch.zeros(rows, columns))
    for column in range(columns):
        first = read_stamp(module)
        module.weight.data[:, column] += 1
        assert read_stamp(module) != first


@pytest.mark.parametrize("name, place", [("table", 0), ("table", BUFFER_SAMPLES - 1), ("other", 1234)])
def test_buffers_count_whole(name, place):
    """One value of thousands of each, also as a new tensor of an offloaded module."""
    module = Held("table", torch.zeros(BUFFER_SAMPLES))
    module.register_buffer("other", torch.zeros(BUFFER_SAMPLES))
    first = read_stamp(module)
    getattr(module, name).data[place] = 1
    assert read_stamp(module) != first


def test_the_last_row_of_embeddings_counts_whole():
    """A textual inversion that replaces another of the same shape, in memory that is moved between calls."""
    encoder = encoder_of()
    cpu_offload_with_hook(encoder, execution_device="cpu")
    first = read_stamp(encoder)
    assert first.is_offloaded
    weight = encoder.get_input_embeddings().weight
    weight.data = weight.data.clone()
    assert read_stamp(encoder) == first
    weight.data[-1, 3] += 1
    assert read_stamp(encoder) != first


@pytest.mark.parametrize("form", [lambda _: None, _quantize], ids=["plain", "quantised"])
def test_weights_can_be_converted_by_swapping(form):
    """As torch does for quantised weights, which may then have no weak reference; moved ones have the same stamp."""
    encoder = encoder_of()
    form(encoder)
    cpu_offload_with_hook(encoder, execution_device="cpu")
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        encoder.to("cpu:0")
        first = read_stamp(encoder)
        encoder.to("cpu")
        assert read_stamp(encoder) == first
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_weights_are_not_kept():
    encoder = encoder_of()
    first = read_stamp(encoder)
    reference = weakref.ref(encoder.get_input_embeddings())
    assert read_stamp(copy.deepcopy(encoder)) != first
    del encoder
    gc.collect()
    assert reference() is None


def test_sharded_weights_have_no_stamp():
    """Processes that share an encoder must call it together."""
    module = Held("weight", torch.randn(4))
    module._parameters["weight"] = Sharded()
    assert read_stamp(module) == "Held has its weight on several devices"


class Sharded:
    """As much of a DTensor as is read."""

    is_meta, device_mesh = False, None
