"""HunyuanVideo's text side: a Llama tokenizer over a grammar's words, and a Llama that tells each word its neighbours.

Byte pairs join the letters of each known word, from its word mark on, into one token; other words fall apart into known
beginnings and letters, and a letter outside ASCII becomes `<unk>`: no prompt is an error.

The pipeline reads the states two layers before the last, so of three layers only the first computes; the other two are
there for it to skip. That first layer starts out as T5's does in `text_encoders`: each head looks at one earlier
offset, 1..8, through the rotation of constant queries and keys alone. A token with too few words before it looks at the
first.
"""

from __future__ import annotations

import string

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel, LlamaTokenizerFast

from .text_encoders import tie_capitals

LLAMA_WIDTH = 96
UNUSED_LAYERS = 2  # HunyuanVideoPipeline's num_hidden_layers_to_skip
OFFSETS = (1, 2, 3, 4, 5, 6, 7, 8)
HEAD_WIDTH = 16
ROTATION_BASE = 10.0  # few and fast rotations tell neighbouring offsets apart
SHARPNESS = 5.0  # of queries and keys: an offset's weight is e^6 times that of the next


def make_llama_tokenizer(words: list[str], *, most_tokens: int) -> LlamaTokenizerFast:
    """Byte-pair tokenizer that holds each of `words`, also capitalised, as one token, and pads on the right."""
    pieces = ["<pad>", "<s>", "</s>", "<unk>", "▁", *string.ascii_letters, *string.digits, *string.punctuation]
    known, merges = set(pieces), []
    for word in [*words, *(word.capitalize() for word in words)]:
        prefix = "▁"
        for letter in word:
            if prefix + letter not in known:
                known.add(prefix + letter)
                pieces.append(prefix + letter)
                merges.append((prefix, letter))
            prefix += letter
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return LlamaTokenizerFast(
        vocab=vocab,
        merges=merges,
        add_bos_token=True,  # what the empty prompt of classifier-free guidance consists of
        pad_token="<pad>",
        padding_side="right",
        model_max_length=most_tokens,
    )


@torch.no_grad()
def make_llama_encoder(tokenizer: LlamaTokenizerFast, seed: int) -> LlamaModel:
    """Encoder whose first layer mixes each word with those at OFFSETS before it. The layers unused take no gradient."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=LLAMA_WIDTH,
        intermediate_size=LLAMA_WIDTH // 3,
        num_hidden_layers=1 + UNUSED_LAYERS,
        num_attention_heads=len(OFFSETS),
        head_dim=HEAD_WIDTH,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROTATION_BASE},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    encoder = LlamaModel(config)
    words = encoder.embed_tokens.weight
    nn.init.normal_(words)
    tie_capitals(words, tokenizer.get_vocab())
    attention, mlp = encoder.layers[0].self_attn, encoder.layers[0].mlp
    nn.init.zeros_(attention.q_proj.weight)
    nn.init.zeros_(attention.k_proj.weight)
    queries, keys = _offset_biases()
    attention.q_proj.bias.copy_(queries)
    attention.k_proj.bias.copy_(keys)
    nn.init.orthogonal_(attention.v_proj.weight)
    nn.init.orthogonal_(attention.o_proj.weight, gain=2.0)
    nn.init.orthogonal_(mlp.down_proj.weight, gain=0.5)
    for module in (*encoder.layers[1:], encoder.norm):
        module.requires_grad_(False)
    return encoder


def _offset_biases() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [heads * HEAD_WIDTH] before rotation: turned to position p, head h looks at p - OFFSETS[h] best.

    A head's first and second half are the real and imaginary parts of what Llama rotates by `frequencies * position`.
    """
    frequencies = ROTATION_BASE ** -(torch.arange(HEAD_WIDTH // 2) / (HEAD_WIDTH // 2))
    turns = torch.tensor(OFFSETS)[:, None] * frequencies
    queries = SHARPNESS * torch.cat((turns.cos(), -turns.sin()), dim=1)
    keys = SHARPNESS * torch.cat((torch.ones_like(turns), torch.zeros_like(turns)), dim=1)
    return queries.flatten(), keys.flatten()
