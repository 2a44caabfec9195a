"""Tokenizers over the grammar's words and the two small text encoders that FLUX asks for.

T5's unigrams hold each known word whole; CLIP's byte pairs join its letters into one or a few tokens, which is enough
for the pooled bag of words. Unknown words fall apart into letters (CLIP) or become `<unk>` (T5); no prompt is an error.

FLUX gives text tokens no positions, so the encoder must tell each word its neighbours. The T5 here starts out doing
just that: one layer whose heads look at one offset each, -6..6 without 0, through the relative position bias alone
(queries and keys are zero and stay so, having no gradient), with random values that training refines. A token whose
neighbour lies beyond the text looks at the nearest one there is. Far from the text every padding token has the same
encoding, whatever the padded length.
"""

from __future__ import annotations

import string

import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from .scenes import vocabulary

TEXT_TOKENS = 64  # the padded length that the transformer is trained at
CLIP_TOKENS = 77
T5_WIDTH = 192
CLIP_WIDTH = 128
OFFSETS = (-6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6)


def make_clip_tokenizer() -> CLIPTokenizer:
    """Byte-pair tokenizer whose merges spell the words of the grammar; an earlier word's merges go first."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    known, merges = set(pieces), []
    for word in vocabulary():
        prefix = word[0]
        for index, letter in enumerate(word[1:], start=1):
            suffix = letter + "</w>" if index == len(word) - 1 else letter
            if prefix + suffix not in known:
                known.add(prefix + suffix)
                pieces.append(prefix + suffix)
                merges.append((prefix, suffix))
            prefix += suffix
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_TOKENS)


def make_t5_tokenizer() -> T5TokenizerFast:
    """Unigram tokenizer with each word of the grammar, lower case and capitalised, as one token."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (",", -2.0), (".", -2.0), ("▁", -4.0)]
    vocab += [("▁" + word, -2.0) for word in vocabulary()]
    vocab += [("▁" + word.capitalize(), -2.0) for word in vocabulary()]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=TEXT_TOKENS)


@torch.no_grad()
def make_clip_encoder(tokenizer: CLIPTokenizer, seed: int) -> CLIPTextModel:
    """Encoder whose pooled output is a bag of words: one layer that looks at all earlier words alike."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModel(config)
    for name, weight in encoder.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "position_embedding.weight")):
            nn.init.zeros_(weight)
        elif name.endswith("token_embedding.weight"):
            nn.init.normal_(weight)
        elif name.endswith(("v_proj.weight", "out_proj.weight")):
            nn.init.orthogonal_(weight, gain=2.0)
    return encoder


@torch.no_grad()
def make_t5_encoder(tokenizer: T5TokenizerFast, seed: int) -> T5EncoderModel:
    """Encoder that mixes each word with its neighbours at OFFSETS."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=T5_WIDTH,
        d_kv=24,
        d_ff=T5_WIDTH,
        num_layers=1,
        num_heads=len(OFFSETS),
        dropout_rate=0.0,
        feed_forward_proj="relu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    encoder = T5EncoderModel(config)
    words = encoder.shared.weight
    nn.init.normal_(words)
    for word in vocabulary():
        lower, upper = tokenizer.convert_tokens_to_ids(["▁" + word, "▁" + word.capitalize()])
        words[upper] = words[lower]
    attention = encoder.encoder.block[0].layer[0].SelfAttention
    nn.init.zeros_(attention.q.weight)
    nn.init.zeros_(attention.k.weight)
    nn.init.orthogonal_(attention.v.weight)
    nn.init.orthogonal_(attention.o.weight, gain=2.0)
    nn.init.orthogonal_(encoder.encoder.block[0].layer[1].DenseReluDense.wi.weight)
    nn.init.orthogonal_(encoder.encoder.block[0].layer[1].DenseReluDense.wo.weight, gain=0.5)
    attention.relative_attention_bias.weight.copy_(_offset_bias(config.relative_attention_num_buckets))
    return encoder


def tokenize_prompts(
    prompts: list[str], tokenizers: tuple[CLIPTokenizer, T5TokenizerFast]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids as FluxPipeline makes them: int64 [N, CLIP_TOKENS] and [N, TEXT_TOKENS]."""
    return tuple(
        tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        for tokenizer, length in zip(tokenizers, (CLIP_TOKENS, TEXT_TOKENS), strict=True)
    )


def _offset_bias(buckets: int) -> torch.Tensor:
    """Bias [buckets, heads] that turns head h to OFFSETS[h], and failing that to the nearest position there is.

    T5's bidirectional buckets hold distance -d at d and +d at buckets // 2 + d, exactly for d < buckets // 4.
    """
    bias = torch.full((buckets, len(OFFSETS)), -120.0)
    for head, offset in enumerate(OFFSETS):
        for distance in range(buckets // 4):
            bias[distance, head] = -8.0 * abs(-distance - offset)
            bias[buckets // 2 + distance, head] = -8.0 * abs(distance - offset)
    return bias
