"""How long prompts are, by the masks that pipelines pass."""

import pytest
import torch

from dit_accel import accelerate_transformer, load_preset
from dit_accel.models.samples import TextLengths, TextMasks
from tests.models.test_transformer import recorded_calls
from tests.tiny import tiny_pipeline

SPARGE = {"policy": "sparge", "steps": "all", "tau_kv": 0.3}


def mask_of(*lengths, tokens=6):
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lengths_are_those_of_the_call(mode):
    """A mask is read once until it is modified; another or a modified one has its own lengths."""
    masks = TextMasks()
    with mode():
        mask, other = mask_of(3, 5), mask_of(2, 2)
        found = masks.lengths(mask)
        assert (found.lengths, found.end, found.leading) == ((3, 5), 5, True)
        assert masks.lengths(mask) is found and masks.lengths(other).lengths == (2, 2)
    if mode is torch.no_grad:  # tensors of inference mode count no versions
        mask[0] = 1
        assert masks.lengths(mask).lengths == (6, 5)
        mask[:, 0] = 0
        assert masks.lengths(mask).lengths == (5, 4) and not masks.lengths(mask).leading


def test_gaps_count_up_to_the_last_token_and_an_empty_prompt_has_one():
    """The model reads as many tokens as the mask has ones, and attention without any key would give NaN."""
    found = TextMasks().lengths(torch.tensor([[1, 0, 0, 1, 0, 0]]))
    assert (found.lengths, found.end, found.leading) == ((2,), 4, False)
    found = TextMasks().lengths(mask_of(0, 4))
    assert found.lengths == (1, 4) and found.counts.tolist() == [1, 4] and found.leading
    assert TextMasks().lengths(mask_of(0)).end == 1


def test_lengths_of_some_samples_are_theirs():
    """In the order asked for; one length for all stays."""
    found = TextMasks().lengths(mask_of(3, 5, 2)).of_rows([2, 1])
    assert (found.lengths, found.counts.tolist(), found.end) == ((2, 5), [2, 5], 5)
    assert TextMasks().lengths(mask_of(3)).of_rows([1, 2]).lengths == (3,)


@pytest.mark.parametrize("shares", [1, 2, 3, 4])
@pytest.mark.parametrize("end", [1, 4, 5, 6])
def test_devices_share_text_with_the_least_padding(shares, end):
    """The end is the first from there on that divides by the devices, and never behind the text that there is."""
    most = 6
    found = TextLengths((end,), torch.tensor([end]), end).divisible(shares, most)
    wanted = [length for length in range(end, most + 1) if length % shares == 0] or [most]
    assert found.end == wanted[0] and found.lengths == (end,)


@pytest.mark.parametrize("level", ["layer", "sparge"])
def test_a_length_that_changes_under_way_drops_records(level):
    """A mask of the same shape with more tokens in every step, in a loop of one's own."""
    pipe = tiny_pipeline("hunyuan")
    arguments, transformer = recorded_calls(pipe, "hunyuan")[0], pipe.transformer
    interval = {"control": "interval", "interval": 1 if level == "sparge" else 2, "warmup": 1, "cooldown": 0}
    sparse = {"skip": {**SPARGE, "refresh": 4}, "blocks": {"size": 64}}
    keys = {"schedule": interval} | ({"forecast": {"level": "layer"}} if level == "layer" else sparse)
    steps = [900.0, 700.0, 500.0, 300.0]
    preset = load_preset("hunyuan-sparge" if level == "sparge" else "balanced", model="hunyuan_video", **keys)
    acceleration = accelerate_transformer(transformer, preset, steps)
    mask = arguments["encoder_attention_mask"]
    with torch.no_grad():
        for count, timestep in enumerate(steps, 3):
            longer = (torch.arange(mask.shape[1]) < count).expand_as(mask).to(mask.dtype)
            inputs = {
                **arguments,
                "encoder_attention_mask": longer,
                "timestep": torch.full_like(arguments["timestep"], timestep),
            }
            assert transformer(**inputs)[0].isfinite().all()
    assert any("changed" in note for note in acceleration.report().notes)
    acceleration.restore()
