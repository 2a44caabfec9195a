"""HunyuanVideo's text encoder: a Llama tokenizer for a grammar's words, and a Llama that mixes neighbouring words.

Byte pairs join the letters of each known word, including its word mark, into one token. Other words become known
beginnings and letters, and a letter outside ASCII becomes `<unk>`: no prompt is an error.

The pipeline reads the states two layers before the last, so only the first of three layers computes; the other two
exist to be skipped. The first layer starts like T5's in `text_encoders`: each head attends to one earlier offset, 1..8,
only through the rotation of constant queries and keys. A token with too few words before it attends to the first token.
"""

import string

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel, LlamaTokenizerFast

from .text_encoders import tie_capitals

LLAMA_WIDTH = 96
UNUSED_LAYERS = 2  # HunyuanVideoPipeline's num_hidden_layers_to_skip
OFFSETS = (1, 2, 3, 4, 5, 6, 7, 8)
HEAD_WIDTH = 16
ROTATION_BASE = 10.0  # few and fast rotations distinguish neighbouring offsets
SHARPNESS = 5.0  # of queries and keys: the weight of an offset is e^6 times the next one's


def make_llama_tokenizer(words: list[str], *, most_tokens: int) -> LlamaTokenizerFast:
    """Build a byte-pair tokenizer with each of `words`, also capitalised, as one token; it pads on the right."""
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
        add_bos_token=True,  # the empty prompt of classifier-free guidance consists of it
        pad_token="<pad>",
        padding_side="right",
        model_max_length=most_tokens,
    )


@torch.no_grad()
def make_llama_encoder(tokenizer: LlamaTokenizerFast, seed: int) -> LlamaModel:
    """Build an encoder whose first layer mixes a word with earlier ones at OFFSETS; unused layers get no gradient."""
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
    """Queries and keys [heads * HEAD_WIDTH] before rotation: at position p, head h attends most to p - OFFSETS[h].

    A head's first and second half are the real and imaginary parts that Llama rotates by `frequencies * position`.
    """
    frequencies = ROTATION_BASE ** -(torch.arange(HEAD_WIDTH // 2) / (HEAD_WIDTH // 2))
    turns = torch.tensor(OFFSETS)[:, None] * frequencies
    queries = SHARPNESS * torch.cat((turns.cos(), -turns.sin()), dim=1)
    keys = SHARPNESS * torch.cat((torch.ones_like(turns), torch.zeros_like(turns)), dim=1)
    return queries.flatten(), keys.flatten()
