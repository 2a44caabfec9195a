"""Interception of a model's own attention, and conversion of masks and padded text for the kernels."""

import pytest
import torch
from torch.nn import functional

from dit_accel.models.families.family import Tokens
from dit_accel.models.interceptor import Catching, Caught, key_lengths, with_leading_keys

TEXT, VISION, HEADS, DIM = 5, 7, 2, 16
TOKENS = Tokens(TEXT, VISION)


def inputs(batch=1, tokens=TEXT + VISION):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, HEADS, tokens, DIM, generator=generator) for _ in range(3)]


USUAL = [{}, {"scale": DIM**-0.5}, {"dropout_p": 0.0, "is_causal": False}]
OTHER = [{"dropout_p": 0.1}, {"is_causal": True}, {"enable_gqa": True}]
OTHER += [{"scale": factor * DIM**-0.5} for factor in (0.5, 2)]


@pytest.mark.parametrize("options", [*USUAL, *OTHER], ids=str)
def test_an_attention_of_another_kind_is_the_models_own(options):
    """It runs unchanged, and the list of missed modules names it; one of the usual kind is caught."""
    torch.manual_seed(0)
    expected, caught = functional.scaled_dot_product_attention(*inputs(), **options), []
    torch.manual_seed(0)
    with Catching(TOKENS, lambda call: caught.append(call.tokens)) as catching:
        output = functional.scaled_dot_product_attention(*inputs(), **options)
    assert caught == ([TOKENS] if options in USUAL else [])
    assert catching.missed is None if caught else "its own scale" in catching.missed and torch.equal(output, expected)


def test_leading_padding_is_counted_by_what_the_picture_reads():
    """The first rows of the mask are padding's own, and empty: it reads nothing and is not read."""
    valid = torch.stack([torch.arange(TEXT + VISION) >= TEXT - count for count in (2, 5)])
    mask = valid[:, None, :, None] & valid[:, None, None, :]
    assert key_lengths(mask, TOKENS).tolist() == [2 + VISION, 5 + VISION]
    assert key_lengths(mask[:, :, -1:], TOKENS).tolist() == [2 + VISION, 5 + VISION]
    assert key_lengths(None, TOKENS) is None


@pytest.mark.parametrize(
    "valid", [[[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]], [[1, 0, 1, 0, 0], [0, 1, 1, 0, 1]]], ids=["leading", "scattered"]
)
def test_text_that_counts_is_put_first_and_comes_back_in_its_place(valid):
    """Rows of text and image equal the masked attention's, in any order."""
    tokens = Tokens(TEXT, VISION, padding="mask")
    counts = torch.cat([torch.tensor(valid).bool(), torch.ones(2, VISION, dtype=torch.bool)], dim=1)
    mask = counts[:, None, None, :].expand(2, 1, TEXT + VISION, -1)
    qkv = tuple(x.transpose(1, 2) for x in inputs(batch=2))
    expected = functional.scaled_dot_product_attention(*inputs(batch=2), attn_mask=mask).transpose(1, 2)

    def attend(arguments):
        keys = torch.arange(arguments.k.shape[1]) < arguments.kv_len[:, None]
        q, k, v = (x.transpose(1, 2) for x in arguments[:3])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=keys[:, None, None]).transpose(1, 2)

    output = with_leading_keys(attend, Caught(tokens, qkv, mask, lambda: expected), 64, key_lengths(mask, tokens))
    torch.testing.assert_close(output[counts], expected[counts])
