"""Number and order of the tokens in a family's call, derived from its arguments."""

from types import SimpleNamespace

import pytest
import torch

from dit_accel.models.families import cogvideox, z_image


@pytest.mark.parametrize(("patch_t", "frames", "grid"), [(None, 3, 3), (1, 3, 3), (2, 3, 2), (2, 4, 2)])
def test_cogvideox_fills_up_a_patch_of_frames(patch_t, frames, grid):
    transformer = SimpleNamespace(config=SimpleNamespace(patch_size=2, patch_size_t=patch_t))
    arguments = {"hidden_states": torch.zeros(1, frames, 4, 8, 6), "encoder_hidden_states": torch.zeros(1, 5, 16)}
    tokens = cogvideox.tokens(transformer, arguments)
    assert (tokens.text, tokens.grid, tokens.vision) == (5, (grid, 4, 3), grid * 12)


@pytest.mark.parametrize("is_omni", [False, True])
def test_z_image_has_prompts_first_where_they_take_turns_with_images(is_omni):
    """Each image and each part of a prompt is padded to a multiple of 32; a reference image adds its own tokens."""
    image, prompt = torch.zeros(16, 1, 12, 12), torch.zeros(33, 8)
    arguments = {"x": [[image, image]], "cap_feats": [[prompt, prompt[:5]]]} if is_omni else {}
    arguments = arguments or {"x": [image], "cap_feats": [prompt]}
    tokens = z_image.tokens(None, arguments)
    assert tokens.text_first == is_omni and tokens.padding == "all"
    assert (tokens.vision, tokens.text) == ((2 * 64, 64 + 32) if is_omni else (64, 64))
    if is_omni:
        read = z_image.tokens(None, arguments | {"siglip_feats": [[torch.zeros(3, 3, 8)]]})
        assert (read.vision, read.text) == (2 * 64 + 32, 96)
