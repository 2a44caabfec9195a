"""Tokenizers for a grammar's words and the two small text encoders that FLUX needs.

T5's unigrams hold each known word whole. CLIP's byte pairs join its letters into one or a few tokens, which is enough
for the pooled bag of words. Unknown words become letters (CLIP) or `<unk>` (T5); no prompt is an error.

FLUX gives text tokens no positions, so the encoder must mix each word with its neighbours. The T5 here starts with one
layer whose heads attend to one offset each, -6..6 without 0, only through the relative position bias (queries and keys
are zero and stay so, because they get no gradient), with random values that training refines. A token whose neighbour
lies outside the text attends to the nearest token. Far from the text every padding token has the same encoding,
whatever the padded length.
"""

import string

import torch
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

TEXT_TOKENS = 64  # padded length in the transformers' training
CLIP_TOKENS = 77
T5_WIDTH = 192
CLIP_WIDTH = 128
OFFSETS = (-6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6)


def make_clip_tokenizer(words: list[str]) -> CLIPTokenizer:
    """Build a byte-pair tokenizer whose merges spell `words`, earlier words first."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    known, merges = set(pieces), []
    for word in words:
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


def make_t5_tokenizer(words: list[str]) -> T5TokenizerFast:
    """Build a unigram tokenizer with each of `words`, also capitalised, as one token."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (",", -2.0), (".", -2.0), ("▁", -4.0)]
    vocab += [("▁" + word, -2.0) for word in words]
    vocab += [("▁" + word.capitalize(), -2.0) for word in words]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=TEXT_TOKENS)


@torch.no_grad()
def make_clip_encoder(tokenizer: CLIPTokenizer, seed: int, *, width: int = CLIP_WIDTH) -> CLIPTextModel:
    """Build an encoder whose pooled output [B, width] is a bag of words: one layer attends equally to earlier words."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width,
        projection_dim=width,
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
def make_t5_encoder(
    tokenizer: T5TokenizerFast, seed: int, *, width: int = T5_WIDTH, multilingual: bool = False
) -> T5EncoderModel | UMT5EncoderModel:
    """Build an encoder that mixes each word with neighbours at OFFSETS; `multilingual` gives UMT5's class, for Wan."""
    torch.manual_seed(seed)
    config_class, encoder_class = (UMT5Config, UMT5EncoderModel) if multilingual else (T5Config, T5EncoderModel)
    config = config_class(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // 8,
        d_ff=width,
        num_layers=1,
        num_heads=len(OFFSETS),
        dropout_rate=0.0,
        feed_forward_proj="relu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    encoder = encoder_class(config)
    nn.init.normal_(encoder.shared.weight)
    tie_capitals(encoder.shared.weight, tokenizer.get_vocab())
    attention = encoder.encoder.block[0].layer[0].SelfAttention
    nn.init.zeros_(attention.q.weight)
    nn.init.zeros_(attention.k.weight)
    nn.init.orthogonal_(attention.v.weight)
    nn.init.orthogonal_(attention.o.weight, gain=2.0)
    nn.init.orthogonal_(encoder.encoder.block[0].layer[1].DenseReluDense.wi.weight)
    nn.init.orthogonal_(encoder.encoder.block[0].layer[1].DenseReluDense.wo.weight, gain=0.5)
    attention.relative_attention_bias.weight.copy_(_offset_bias(config.relative_attention_num_buckets))
    return encoder


def tie_capitals(embedding: torch.Tensor, vocab: dict[str, int]) -> None:
    """Initialise each capitalised piece of `vocab` with its lower-case form in `embedding` [pieces, width]."""
    for piece, index in vocab.items():
        if piece != piece.lower() and piece.lower() in vocab:
            embedding[index] = embedding[vocab[piece.lower()]]


def _offset_bias(buckets: int) -> torch.Tensor:
    """Bias [buckets, heads] with which head h attends to OFFSETS[h], or else to the nearest existing position.

    T5's bidirectional buckets hold distance -d at d and +d at buckets // 2 + d, exactly for d < buckets // 4.
    """
    bias = torch.full((buckets, len(OFFSETS)), -120.0)
    for head, offset in enumerate(OFFSETS):
        for distance in range(buckets // 4):
            bias[distance, head] = -8.0 * abs(-distance - offset)
            bias[buckets // 2 + distance, head] = -8.0 * abs(distance - offset)
    return bias
