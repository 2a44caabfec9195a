"""Facts of families: tokens and grids of a call, the outputs that count for the error, and expected memory."""

from types import SimpleNamespace

import pytest
import torch
from diffusers.models.transformers import transformer_hidream_image as original

from dit_accel.models.families.cogvideox import FAMILY as COGVIDEOX
from dit_accel.models.families.family import Load, Tokens, batch_of, latents_of, part_of
from dit_accel.models.families.flux3 import FAMILY as FLUX3
from dit_accel.models.families.hidream import FAMILY as HIDREAM
from dit_accel.models.families.hunyuan_image import FAMILY as HUNYUAN_IMAGE
from dit_accel.models.families.lumina2 import FAMILY as LUMINA
from dit_accel.models.families.wan import FAMILY as WAN
from dit_accel.models.families.wan_relatives import SKYREELS_V2
from dit_accel.models.families.z_image import FAMILY as Z_IMAGE


def model(**config):
    """A transformer that has this configuration alone."""
    return SimpleNamespace(config=SimpleNamespace(**config))


def frames(*sizes):
    """Latents of two videos, or with two sizes of two images."""
    return {"hidden_states": torch.zeros(2, 4, *sizes)}


def hidream(*shape):
    llama, size = torch.zeros(3, 2, 7, 8), SimpleNamespace(config=SimpleNamespace(patch_size=2), max_seq=64)
    text = {"encoder_hidden_states_t5": TEXT, "encoder_hidden_states_llama3": llama}
    return HIDREAM, size, {"hidden_states": torch.zeros(2, *shape), **text}


def cogvideox(patch, count):
    latents = {"hidden_states": torch.zeros(2, count, 4, 8, 6)}
    return COGVIDEOX, model(patch_size=2, patch_size_t=patch), PROMPT | latents


def z_image(**changes):
    """Each image and each part of a prompt is padded to a multiple of 32 tokens."""
    image, prompt = torch.zeros(16, 1, 12, 12), torch.zeros(33, 8)
    return (
        Z_IMAGE,
        None,
        {"x": [image], "cap_feats": [prompt]} | {name: make(image, prompt) for name, make in changes.items()},
    )


TEXT = torch.zeros(2, 5, 8)
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
PROMPT = {"encoder_hidden_states": TEXT}
ONE_ENCODER = SimpleNamespace(config=SimpleNamespace(patch_size=(1, 1, 1)), context_embedder_2=None)
TURNS = {"x": lambda image, _: [[image, image]], "cap_feats": lambda _, prompt: [[prompt, prompt[:5]]]}
READ = {"siglip_feats": lambda *_: [[torch.zeros(3, 3, 8)]]}
IMAGES = {"hidden_states": torch.zeros(2, 12, 4), "image_cond_hidden_states": torch.zeros(2, 9, 4)}
GRIDS = {  # by name: family, transformer and arguments; tokens
    "wan-patched-frames": ((WAN, model(patch_size=(2, 1, 2)), frames(4, 8, 6)), Tokens(0, 48, grid=(2, 8, 3))),
    # The longest prompt without padding.
    "lumina": (
        (LUMINA, model(patch_size=2), frames(8, 6) | {"encoder_attention_mask": MASK}),
        Tokens(4, 12, padding="all"),
    ),
    "hunyuan-image-refiner": (
        (HUNYUAN_IMAGE, ONE_ENCODER, frames(1, 8, 6) | PROMPT | {"encoder_hidden_states_2": None}),
        Tokens(5, 48, text_first=False, padding="all"),
    ),
    "flux3-references": ((FLUX3, model(), PROMPT | IMAGES), Tokens(5, 21)),
    "hidream-patches": (hidream(12, 16), Tokens(19, 12, text_first=False)),
    **{
        f"cogvideox-{patch}-{count}": (cogvideox(patch, count), Tokens(5, 12 * grid, grid=(grid, 4, 3)))
        for patch, count, grid in ((None, 3, 3), (1, 3, 3), (2, 3, 2), (2, 4, 2))
    },
    "z-image-omni": (z_image(**TURNS), Tokens(64 + 32, 2 * 64, padding="all")),
    "z-image-references": (z_image(**TURNS, **READ), Tokens(64 + 32, 2 * 64 + 32, padding="all")),
}


@pytest.mark.parametrize(("call", "tokens"), GRIDS.values(), ids=GRIDS)
def test_tokens_of_a_call_follow_from_its_arguments(call, tokens):
    """Sides that differ, patches of any shape, filled up, and a batch, which adds none to a sequence."""
    family, transformer, arguments = call
    assert family.tokens(transformer, arguments) == tokens


def test_tokens_that_are_given_to_wan_are_not_judged():
    """They have timestep 0; without timesteps of tokens all is made, and SkyReels-V2's are of frames."""
    transformer, latents = model(patch_size=(1, 2, 2)), torch.zeros(1, 4, 2, 4, 6)
    output, timestep = torch.ones_like(latents), torch.tensor([[0.0] * 6 + [9.0] * 6])
    timestep[:, 7] = 0  # the second token of the second frame's first row
    first, second = WAN.used(transformer, output, {"hidden_states": latents, "timestep": timestep})[0, 0]
    assert not first.any() and second.tolist() == [[1, 1, 0, 0, 1, 1]] * 2 + [[1] * 6] * 2
    assert WAN.used(transformer, output, {"hidden_states": latents, "timestep": torch.zeros(1)}) is output
    assert SKYREELS_V2.used(transformer, output, {"hidden_states": latents, "timestep": timestep}) is output


@pytest.mark.parametrize(
    ("forcing", "count", "has_grid"), [(None, 1, True), (False, 1, True), (True, 1, False), (False, 4, False)]
)
def test_skyreels_keeps_its_order_where_frames_differ(forcing, count, has_grid):
    """Frames with different timesteps or attention ranges keep their order; the number of tokens is the same."""
    transformer = model(patch_size=(1, 2, 2), num_frame_per_block=count)
    inputs = frames(3, 8, 6) | ({} if forcing is None else {"enable_diffusion_forcing": forcing})
    tokens = SKYREELS_V2.tokens(transformer, inputs)
    assert tokens.vision == 36 and (tokens.grid == (3, 4, 3) if has_grid else tokens.grid is None)


def test_images_beside_wans_prompt_count_for_their_sample():
    """A first and a last frame come in two rows a sample."""
    transformer = model(num_attention_heads=2, attention_head_dim=8, ffn_dim=64)
    inputs = {"hidden_states": torch.zeros(2, 4, 1, 4, 4), "encoder_hidden_states": torch.zeros(2, 6, 8)}
    for rows, prompt in ((None, 6), (2, 6 + 3), (4, 6 + 6)):
        image = {} if rows is None else {"encoder_hidden_states_image": torch.zeros(rows, 3, 8)}
        load = Load(transformer, inputs | image, Tokens(0, 4))
        assert WAN.work(load, None) == load.beside_prompt("attn1", 4, prompt, 16, 8)


@pytest.mark.parametrize("routed, activated", [(4, 2), (4, 1), (0, 0)], ids=["two experts", "one expert", "none"])
@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_hidreams_mlps_count_the_experts_that_run(routed, activated, double):
    """The count equals the matrices' numbers at the model's own width, which is rounded up by little."""
    kind = original.HiDreamImageTransformerBlock if double else original.HiDreamImageSingleTransformerBlock
    with torch.device("meta"):
        inner = kind(
            dim=2560,
            num_attention_heads=20,
            attention_head_dim=128,
            num_routed_experts=routed,
            num_activated_experts=activated,
        )
    block = SimpleNamespace(block=inner)
    transformer = model(num_routed_experts=routed, num_activated_experts=activated)

    def numbers(module):
        return sum(weight.numel() for name, weight in module.named_parameters() if "gate" not in name)

    image = numbers(inner.ff_i)
    if routed:
        expert = numbers(inner.ff_i.experts[0])
        image -= (routed - activated) * expert
    text = numbers(inner.ff_t) if double else image
    assert HIDREAM.mlp(transformer) * 2560**2 == pytest.approx(image, rel=0.03)
    assert HIDREAM.text_mlp(transformer, block) * 2560**2 == pytest.approx(text, rel=0.03)


def test_keys_and_values_that_heads_share_make_projections_smaller():
    assert [LUMINA.mlp(model(num_attention_heads=8, num_kv_heads=kv)) for kv in (None, 8, 2)] == [12, 12, 10.5]


def test_an_attention_is_known_by_its_queries_and_keys():
    """Attention runs over all tokens, without padding if samples run separately, or with text only among the keys."""
    joint, apart, keyed = Tokens(4, 10), Tokens(4, 10, padding="sample"), Tokens(4, 10, text_asks=False)
    assert joint.of_attention(14, 14) is joint and joint.of_attention(10, 14) is joint.of_attention(12, 12) is None
    assert apart.of_attention(14, 14) is apart and apart.of_attention(12, 12).text == 2
    assert apart.of_attention(10, 10).text == 0 and apart.of_attention(9, 9) is apart.of_attention(15, 15) is None
    assert keyed.of_attention(10, 14) is keyed and keyed.of_attention(14, 14) is keyed.of_attention(10, 10) is None
    assert joint.seen(False) == Tokens(0, 10) and joint.seen(True) is joint
    layout = Tokens(4, 10, text_first=False).layout(64)
    assert (layout.text, layout.vision, layout.block, layout.text_first) == (4, 10, 64, False)


def test_latents_are_found_by_either_name_in_lists_too():
    """Each entry of a list is one sample, whatever its size."""
    samples = [torch.zeros(4, 2, 2), torch.zeros(4, 3, 2)]
    assert latents_of({"x": samples}) == samples and batch_of({"x": samples}) == 2
    assert batch_of({"hidden_states": torch.zeros(3, 5), "x": samples}) == 3 and latents_of({"prompt": 1}) == []
    block = SimpleNamespace(block=SimpleNamespace(ff_i=1))
    assert part_of(block, "block.ff_i") == 1 and part_of(block, "block.ff_t") is part_of(block, "other.ff_i") is None
