"""Stamps differ when a module may give other outputs, agree otherwise, and hold no weights."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from dit_accel.stages.stamps import BUFFER_SAMPLES, SAMPLES, read_stamp
from tests.tiny import encoders

CPU = torch.device("cpu")


@pytest.fixture
def encoder():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return encoders.llama()["text_encoder"].eval()


def module_with(**tensors):
    module = nn.Module().eval()
    for name, tensor in tensors.items():
        if name == "weight":
            module.weight = nn.Parameter(tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def _quantize(encoder):
    quantize_(encoder, Int8WeightOnlyConfig())


FORMS = {
    "quantised": _quantize,
    "cast": lambda encoder: apply_layerwise_casting(encoder, torch.float8_e4m3fn, torch.float32),
    "offloaded": lambda encoder: apply_group_offloading(encoder, CPU, CPU, offload_type="leaf_level"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_other_forms_of_weights_have_stamps(form, encoder):
    """A run changes none, and a written weight does."""
    form(encoder)
    first = read_stamp(encoder)
    assert not isinstance(first, str), first
    assert first.is_offloaded == (form is not _quantize)
    encoder(torch.randint(3, 40, (2, 9)))
    assert read_stamp(encoder) == first
    norm = next(module for module in encoder.modules() if hasattr(module, "variance_epsilon"))
    norm.weight.data = 2 * norm.weight.data
    assert read_stamp(encoder) != first


def test_quantised_data_counts(encoder):
    _quantize(encoder)
    first = read_stamp(encoder)
    weight = next(module for module in encoder.modules() if isinstance(module, nn.Linear)).weight
    getattr(weight, weight.__tensor_flatten__()[0][0]).neg_()
    assert read_stamp(encoder) != first


WEIGHTS = {
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(1.0),
    "transposed": torch.randn(37, 53).t(),
    "expanded": torch.ones(1).expand(1000),
    "float8": torch.randn(64, 3).to(torch.float8_e4m3fn),
    "bool": torch.rand(100) > 0.5,
    "complex": torch.randn(40, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_read_of_any_weight(name):
    module = module_with(buffer=WEIGHTS[name])
    assert not isinstance(first := read_stamp(module), str)
    assert read_stamp(module) == first


SIZES = [1, SAMPLES - 1, SAMPLES, SAMPLES + 1, 3 * SAMPLES, 1000]
MATRICES = [(16, 16), (17, 16), (33, 8), (64, 4), (20, 6)]  # some with a power of two of columns
WRITES = [((size,), ...) for size in SIZES]
WRITES += [(shape, (slice(None), column)) for shape in MATRICES for column in range(shape[1])]


def test_writes_show():
    """To all values or to a column, though no version counter changes; a merged LoRA may change a single feature."""
    for shape, place in WRITES:
        module = module_with(weight=torch.zeros(shape))
        first = read_stamp(module)
        module.weight.data[place] += 1
        assert module.weight._version == 0 and read_stamp(module) != first, (shape, place)


@pytest.mark.parametrize("name, place", [("table", 0), ("table", BUFFER_SAMPLES - 1), ("other", 1234)])
def test_buffers_count_whole(name, place):
    """One value of thousands of each, also as a new tensor of an offloaded module."""
    module = module_with(table=torch.zeros(BUFFER_SAMPLES), other=torch.zeros(BUFFER_SAMPLES))
    first = read_stamp(module)
    getattr(module, name).data[place] = 1
    assert read_stamp(module) != first


def test_the_last_row_of_embeddings_counts_whole(encoder):
    """A textual inversion that replaces another of the same shape, in memory that is moved between calls."""
    cpu_offload_with_hook(encoder, execution_device="cpu")
    first = read_stamp(encoder)
    assert first.is_offloaded
    weight = encoder.get_input_embeddings().weight
    weight.data = weight.data.clone()
    assert read_stamp(encoder) == first
    weight.data[-1, 3] += 1
    assert read_stamp(encoder) != first


@pytest.mark.parametrize("form", [lambda _: None, _quantize], ids=["plain", "quantised"])
def test_weights_can_be_converted_by_swapping(form, encoder, monkeypatch):
    """As torch does for quantised weights, which may then have no weak reference; moved ones have the same stamp."""
    form(encoder)
    cpu_offload_with_hook(encoder, execution_device="cpu")
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    encoder.to("cpu:0")
    first = read_stamp(encoder)
    encoder.to("cpu")
    assert read_stamp(encoder) == first


def test_weights_are_not_kept():
    module = module_with(weight=torch.zeros(3))
    first, reference = read_stamp(module), weakref.ref(module.weight)
    assert read_stamp(copy.deepcopy(module)) != first
    del module
    gc.collect()
    assert reference() is None


def test_sharded_weights_have_no_stamp():
    """Processes that share an encoder must call it together."""
    module = module_with(weight=torch.randn(4))
    module._parameters["weight"] = SimpleNamespace(is_meta=False, device_mesh=None)  # as much of a DTensor as is read
    assert read_stamp(module) == "Module has its weight on several devices"
