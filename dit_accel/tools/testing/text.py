"""Tiny tokenizers and text encoders, made in memory.

Tokenizers split into single characters, so every prompt of ASCII text has its own ids and no merge table is needed.
"""

import string

FEATURES = 32  # features of every text encoder here, and so the transformers' `joint_attention_dim`, `text_dim`, …
IMAGE_MARK, HEADER_END = "<image>", "<|end_header_id|>"  # in the prompt of HunyuanVideo's image-to-video
VOCABULARY = 320  # rows of every embedding: 256 bytes and the special tokens fit


def clip_tokenizer():
    """`CLIPTokenizer` over bytes, each also as the last one of a word, with prompts padded to 77 tokens."""
    from transformers import CLIPTokenizer

    characters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{character}</w>" for character in characters)]
    return CLIPTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_tokenizer():
    """`T5Tokenizer` (a unigram model) whose pieces are the printable ASCII characters and the word mark."""
    from transformers import T5Tokenizer

    characters = string.ascii_letters + string.digits + string.punctuation
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((piece, -2.0) for piece in characters)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def qwen_tokenizer():
    """`Qwen2Tokenizer` over the 256 bytes, whose chat template is the last message itself."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        padding_side="right",
        chat_template="{{ messages[-1]['content'] }}",
    )


def llama_tokenizer():
    """`LlamaTokenizer` whose tokens are the printable ASCII characters, the word mark and HunyuanVideo's marks."""
    from transformers import LlamaTokenizer

    characters = string.ascii_letters + string.digits + string.punctuation
    tokens = ["<unk>", "<s>", "</s>", "▁", *characters]
    return LlamaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        pad_token="</s>",
        padding_side="right",
        additional_special_tokens=[IMAGE_MARK, HEADER_END],
        model_max_length=512,
    )


def clip_text_encoder(*, width: int = FEATURES, projection: bool = False):
    """`CLIPTextModel`, or `CLIPTextModelWithProjection` as SD3 wants it; pooled output `[B, width]`."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def t5_text_encoder(*, multilingual: bool = False):
    """`T5EncoderModel`, or `UMT5EncoderModel` as Wan wants it; hidden states `[B, tokens, FEATURES]`."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    config_class, model_class = (UMT5Config, UMT5EncoderModel) if multilingual else (T5Config, T5EncoderModel)
    return model_class(
        config_class(vocab_size=VOCABULARY, d_model=FEATURES, d_kv=16, d_ff=2 * FEATURES, num_layers=2, num_heads=2)
    )


def byt5_tokenizer():
    """`ByT5Tokenizer` over the 256 bytes."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0)


def llama_config() -> dict:
    """Sizes of a causal language model; three layers, as HunyuanVideo reads the output of the last but two."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": FEATURES,
        "intermediate_size": 2 * FEATURES,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def llama_text_encoder():
    """`LlamaModel`; hidden states `[B, tokens, FEATURES]` of the embedding and of three layers."""
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**llama_config()))


def _qwen_text_config() -> dict:
    multimodal = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    return {**llama_config(), "rope_parameters": multimodal, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def qwen_language_model():
    """`Qwen2_5_VLTextModel`, the language model alone, as HunyuanVideo 1.5 wants it."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextModel

    return Qwen2_5_VLTextModel(Qwen2_5_VLConfig(text_config=_qwen_text_config()).text_config)


def qwen_text_encoder():
    """`Qwen2_5_VLForConditionalGeneration`, whose vision tower is there for the class and sees no picture."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=_qwen_text_config(),
        vision_config={
            "depth": 1,
            "hidden_size": FEATURES,
            "intermediate_size": FEATURES,
            "num_heads": 2,
            "out_hidden_size": FEATURES,
            "fullatt_block_indexes": [0],
        },
    )
    return Qwen2_5_VLForConditionalGeneration(config)
