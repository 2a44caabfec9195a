"""Sizes of kernels that are measured on the user's GPU; kernels run in Triton's interpreter, times are made up."""

import json
from itertools import count

import pytest
import torch

from dit_accel.cli.env import tune_sizes
from dit_accel.kernels import quantized_linear
from dit_accel.kernels._triton import configs
from dit_accel.tools.measure import sizes

CPU = torch.device("cpu")
SHIPPED, ATTENTION = configs.CONFIGS["linear layers"][""], configs.CONFIGS["attention"]


@pytest.fixture
def forget(monkeypatch, tmp_path):
    """Time and check small calls of two kernels; returns a function after which the file is read again."""
    monkeypatch.setenv("DIT_ACCEL_CACHE", str(tmp_path / "cache"))
    for name, value in {"TIMED": ((300, 1),), "CHECKED": ((300, 1, 200),)}.items():
        monkeypatch.setattr(sizes, name, value)
    monkeypatch.setattr(configs, "CONFIGS", {name: configs.CONFIGS[name] for name in ("linear layers", "GEMM-O")})
    forget = lambda: (configs.own_sizes.cache_clear(), configs._config.cache_clear())  # noqa: E731
    forget()
    yield forget
    forget()


def launched(kernel):
    return configs._config(kernel, CPU, False)


def test_faster_sizes_are_kept_and_launched_from_then_on(forget, monkeypatch, capsys):
    """Sizes that are wrong, or faster by less than 3%, are not."""

    def product(values, *others, backend, **options):
        is_wrong = backend == "triton" and launched("linear layers")["CHANNELS"] < SHIPPED["CHANNELS"]
        return quantized_linear(values, *others, **options) * (0.9 if is_wrong else 1.0)

    def ms(call):
        linear, gemm = launched("linear layers"), launched("GEMM-O")
        is_fast = linear["CHANNELS"] < SHIPPED["CHANNELS"], linear["STAGES"] < SHIPPED["STAGES"]
        return 1.0 - 0.2 * sum(is_fast) - 0.02 * (gemm["STAGES"] == 2)

    monkeypatch.setattr("dit_accel.kernels.quantized_linear", product)
    tune_sizes(CPU, 1.0, lambda: 0.0, timer=ms)
    faster, said = SHIPPED | {"STAGES": 2}, capsys.readouterr().out.splitlines()
    assert said[:2] == [f"linear layers: 1.25x with {faster}", "GEMM-O: as shipped"]
    assert said[2].endswith(str(configs.sizes_file(CPU)))
    assert said[3:] == [f'    "linear layers": {json.dumps({"": faster})},']
    forget()
    assert launched("linear layers") == faster and launched("GEMM-O") == configs.CONFIGS["GEMM-O"][""]
    others = [{"linear layers": other} for other in (None, {"STAGES": 2}, {**faster, "STAGES": "2"})]
    for text in ("{", "[]", *map(json.dumps, others)):
        configs.sizes_file(CPU).write_text(text)
        forget()
        assert launched("linear layers") == SHIPPED


def test_time_and_interrupts_end_it_with_what_was_found(forget, capsys):
    seconds = count(step=20.0)
    tune_sizes(CPU, 1.0, lambda: next(seconds), timer=lambda call: 1.0)
    assert configs.own_sizes(CPU) == {} and "stopped at GEMM-O\n" in capsys.readouterr().out

    def ms(call):
        if call.func is not sizes.kernels.quantized_linear:
            raise KeyboardInterrupt
        return float(launched("linear layers")["num_warps"])

    tune_sizes(CPU, 1.0, lambda: 0.0, timer=ms)
    (found,) = json.loads(configs.sizes_file(CPU).read_text()).values()
    assert found["num_warps"] == 2 and "stopped at GEMM-O\n" in capsys.readouterr().out


@pytest.mark.parametrize("by_tma", [False, True])
def test_sizes_serve_the_variant_that_they_were_measured_for(forget, by_tma):
    configs.CONFIGS["attention"] = ATTENTION
    own, shipped = {"STAGES": 4}, ATTENTION["" if by_tma else "tma"]
    configs.launch_with(CPU, "attention" + configs.BY_TMA * by_tma, own)
    found = [configs.config("attention", torch.empty(0).half(), variant) for variant in (by_tma, not by_tma)]
    assert found == [own, shipped]


@pytest.mark.parametrize("kernel", sizes.names(CPU))
def test_every_kernel_has_a_call_that_launches_it_and_is_right(kernel, monkeypatch):
    monkeypatch.setattr("dit_accel.kernels.symbols.SHORT_PAIRS", 0)  # as in the calls that are timed
    looked_up, look_up = [], configs._config
    monkeypatch.setattr(configs, "_config", lambda name, *rest: looked_up.append(name) or look_up(name, *rest))
    call = sizes.call_of(kernel, CPU, 300, 2, 200)
    expected, found = (call(backend=backend).float() for backend in ("reference", "triton"))
    assert (found - expected).abs().mean() < 0.01 * expected.abs().mean()
    assert kernel in looked_up
