"""Token orders in pipelines: only the blocks see videos in another order."""

import pytest
import torch
from peft import LoraConfig

from dit_accel import accelerate_transformer, accelerated, load_preset
from dit_accel.errors import UnsupportedError
from dit_accel.models.driver import RASTER
from dit_accel.models.hooks import ORDER_HOOK
from dit_accel.models.token_order_hook import TokenOrder
from dit_accel.sparse.tile_site import TileSite
from dit_accel.sparse.token_order import token_order
from tests.models import tiny
from tests.rounding import distance
from tests.tiny import tiny_output, tiny_pipeline

WAN = ("wan", "wan22", "wan22-5b-i2v")
HUNYUAN = ("hunyuan", "hunyuan-i2v")
FIRST_FRAME_APART = ("hunyuan-i2v",)
GRID = (3, 12, 10)  # tokens of the videos here, whose 96 × 80 pixels are 8 × 8 to a token
SCHEDULE = {"control": "interval", "warmup": 1, "interval": 2, "cooldown": 0}  # FULL UPDATE DISPATCH UPDATE
DENSE = {"policy": "sparge", "steps": "all", "tau_kv": 0.0}
SPARSE = {"policy": "sparge", "steps": "all", "tau_kv": 0.6}
BY_FACTS = {
    "hunyuan15": "hunyuan_video15",
    "skyreels-v2": "skyreels_v2",
    "mochi": "mochi",
}  # tiny pipelines and families
pipeline = tiny.pipeline


def preset(name: str, order: str, level: str = "output", skip: dict = SPARSE, **overrides):
    sections = {
        "model": BY_FACTS.get(name, "wan" if name in WAN else "hunyuan_video"),
        "schedule": SCHEDULE,
        "forecast": {"level": level},
        "blocks": {"size": 64, "token_order": order},
        "skip": skip,
    }
    if level == "head":
        sections["reuse"] = {"tau_q": 0.0 if skip is DENSE else 0.7, "ramp": 0.3}
    return load_preset("exact", **sections, **overrides)


def call(name: str, pipe=None, **overrides) -> torch.Tensor:
    if name in BY_FACTS:
        return tiny.output(name, 4)
    prompt = "a red fox" if name in WAN else ["a red fox", "two blue whales asleep"]  # with padding of unequal length
    arguments = {"steps": 4, "height": 96, "width": 80, "prompt": prompt, **overrides}
    return tiny_output(pipe or pipeline(name), name, **arguments)


def result(name: str, order: str, *options, **overrides) -> torch.Tensor:
    with accelerated(pipeline(name), preset(name, order, *options)):
        return call(name, **overrides)


@pytest.mark.parametrize("name", (*WAN, *HUNYUAN, *BY_FACTS))
def test_dense_results_do_not_depend_on_the_order(name):
    """With all tiles computed, Hilbert order equals raster order up to rounding; with skipped tiles they differ."""
    assert distance(result(name, "hilbert", "output", DENSE), result(name, "raster", "output", DENSE)) < 1e-5
    assert distance(result(name, "hilbert"), result(name, "raster")) > 1e-4


@pytest.mark.parametrize(("level", "order"), [("layer", "hilbert"), ("head", "tiles")])
@pytest.mark.parametrize("name", ["wan22-5b-i2v", "hunyuan-i2v"])
def test_what_blocks_remember_keeps_the_order(name, level, order):
    """Forecasts of layers and rows follow the token order, and outputs are in raster order."""
    assert distance(result(name, order, level, DENSE), result(name, "raster", level, DENSE)) < 1e-5
    assert distance(result(name, order, level), result(name, "raster", level)) > 1e-4


@pytest.mark.parametrize(
    ("name", "order"), [("wan", "hilbert"), ("wan22-5b-i2v", "tiles"), ("hunyuan", "tiles"), ("hunyuan-i2v", "hilbert")]
)
def test_blocks_see_tokens_in_the_order(monkeypatch, name, order):
    """Queries and keys of a whole denoising step are those of raster order, with permuted video tokens."""
    seen, attend = [], TileSite.attend_computed

    def spy(site, inputs):
        seen.append((inputs.q, inputs.k))
        return attend(site, inputs)

    monkeypatch.setattr(TileSite, "attend_computed", spy)
    for item in (order, "raster"):
        with accelerated(pipeline(name), preset(name, item, "output", DENSE, **{"schedule.warmup": 0})):
            call(name, steps=1)
    ordered, raster = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    places = token_order(order, GRID, 64, first_frame_apart=name in FIRST_FRAME_APART)
    vision = len(places)
    assert len(ordered) >= 2
    for actual, expected in zip(sum(ordered, ()), sum(raster, ()), strict=True):
        assert distance(actual[:, :vision], expected[:, places]) < 1e-5
        assert distance(actual[:, :vision], expected[:, :vision]) > 0.1
        if actual.shape[1] > vision:
            assert distance(actual[:, vision:], expected[:, vision:]) < 1e-5


@pytest.mark.parametrize("name", ["wan22-5b-i2v", "hunyuan-i2v"])
def test_only_a_requested_order_has_hooks(name):
    """The order that a run had can be read."""
    pipe = pipeline(name)

    def ordered_modules():
        registries = (getattr(module, "_diffusers_hook", None) for module in pipe.transformer.modules())
        return sum(ORDER_HOOK in registry.hooks for registry in registries if registry is not None)

    with accelerated(pipe, preset(name, "raster")):
        assert ordered_modules() == 0
    with accelerated(pipe, preset(name, "tiles")):
        assert ordered_modules() >= 3
        assert pipe.dit_accel.token_order is None, "no run yet"
        call(name)
        expected = token_order("tiles", GRID, 64, first_frame_apart=name in FIRST_FRAME_APART)
        assert torch.equal(pipe.dit_accel.token_order, expected)
    assert ordered_modules() == 0


@pytest.mark.parametrize("name", ["wan", "hunyuan-i2v"])
def test_another_resolution_has_an_order_of_its_own(name):
    """A run on another grid equals one in a fresh acceleration."""
    expected = result(name, "hilbert", height=64, width=112)
    with accelerated(pipeline(name), preset(name, "hilbert")):
        call(name)
        assert torch.equal(call(name, height=64, width=112), expected)


@pytest.mark.parametrize(
    "name, targets",
    [("wan", ["patch_embedding", "proj_out"]), ("hunyuan", ["x_embedder.proj", "proj_out"])],
    ids=["wan", "hunyuan"],
)
def test_lora_on_the_ends_may_come_later(name, targets):
    """An adapter that replaces the projections at entrance and exit under an order works as in raster order."""
    pipe = tiny_pipeline(name)  # its own, because adapters leave their layers

    def with_lora(order):
        with accelerated(pipe, preset(name, order, "output", DENSE)):
            torch.manual_seed(0)
            pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
            try:
                return call(name, pipe)
            finally:
                pipe.transformer.unload_lora()

    expected = with_lora("raster")
    assert distance(expected, call(name, pipe)) > 1e-3 and distance(with_lora("tiles"), expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("is_forcing", [True, False], ids=["forcing", "causal"])
def test_what_goes_by_frames_keeps_its_order(is_forcing):
    """SkyReels-V2's diffusion forcing has timesteps of frames, and its causal mask hides later ones."""
    transformer = pipeline("skyreels-v2").transformer
    noise = torch.randn(1, 16, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    timestep = torch.tensor([[0, 300, 600, 999]]) if is_forcing else torch.tensor([999])
    text = torch.ones(1, 5, transformer.config.text_dim)
    arguments = {"enable_diffusion_forcing": is_forcing, "return_dict": False}
    transformer.register_to_config(num_frame_per_block=1 if is_forcing else 2)
    try:
        plain = transformer(noise, timestep, text, **arguments)[0]
        acceleration = accelerate_transformer(transformer, preset("skyreels-v2", "hilbert", skip=DENSE), [999, 500])
        assert torch.equal(transformer(noise, timestep, text, **arguments)[0], plain)
        assert RASTER in acceleration.report().notes
        acceleration.restore()
    finally:
        transformer.register_to_config(num_frame_per_block=1)


def test_a_part_of_the_tokens_is_refused():
    """If a video's tokens are spread over devices, the message names the key and the solution."""
    order = TokenOrder("tiles", 64, first_frame_apart=False)
    with pytest.raises(UnsupportedError, match=r"needs all 360 tokens.*got 180.*set it to raster"):
        order.apply(torch.zeros(1, 180, 8), GRID, 1)
