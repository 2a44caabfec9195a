"""Tiny tokenizers, text and image encoders, made in memory; those of text as the components of a pipeline.

Tokenizers split into single characters, so every prompt of ASCII text has its own ids and no merge table is needed.
"""

import string

import transformers
from tokenizers.pre_tokenizers import ByteLevel

FEATURES = 32  # of every encoder here, and so the transformers' `joint_attention_dim`, `text_dim`, …
IMAGE_MARK, HEADER_END = "<image>", "<|end_header_id|>"  # in the prompt of HunyuanVideo's image-to-video
VOCABULARY = 320  # rows of every embedding: 256 bytes and the special tokens fit
SIDE, PATCH = 16, 8  # pixels of an image encoder's input: 4 patches
PICTURE_TOKENS = (SIDE // PATCH) ** 2
CHARACTERS = string.ascii_letters + string.digits + string.punctuation
_LAYERS = {"hidden_size": FEATURES, "intermediate_size": 2 * FEATURES, "num_attention_heads": 2}
_VISION = {**_LAYERS, "num_hidden_layers": 2, "image_size": SIDE, "patch_size": PATCH}
# A causal language model; three layers, as HunyuanVideo reads the output of the last but two.
LLAMA = {
    **_LAYERS,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_QWEN = {**LLAMA, "rope_parameters": _MULTIMODAL_ROPE, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def clip(number: str = "", *, width: int = FEATURES, projection: bool = False) -> dict:
    """`CLIPTextModel`, or `CLIPTextModelWithProjection` as SD3 wants it, with pooled output `[B, width]`.

    The tokenizer is one over bytes, each also as the last one of a word, with prompts padded to 77 tokens. ``number``
    is the end of the components' names, `"_2"` for a pipeline's second encoder.
    """
    characters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{character}</w>" for character in characters)]
    tokenizer = transformers.CLIPTokenizer(vocab=_ids(tokens), merges=[], model_max_length=77)
    config = transformers.CLIPTextConfig(
        **{**_LAYERS, "hidden_size": width, "intermediate_size": 2 * width},
        vocab_size=VOCABULARY,
        projection_dim=width,
        num_hidden_layers=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return {f"text_encoder{number}": model(config), f"tokenizer{number}": tokenizer}


def t5(number: str = "", *, model: str = "T5", byte_tokens: bool = False) -> dict:
    """`T5EncoderModel`, or `UMT5EncoderModel` as Wan wants it; hidden states `[B, tokens, FEATURES]`.

    The tokenizer has the printable ASCII characters and the word mark for its pieces (a unigram model), or is ByT5's
    over the 256 bytes.
    """
    config = getattr(transformers, f"{model}Config")(
        vocab_size=VOCABULARY, d_model=FEATURES, d_kv=16, d_ff=2 * FEATURES, num_layers=2, num_heads=2
    )
    if byte_tokens:
        tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    else:
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((piece, -2.0) for piece in CHARACTERS)]
        tokenizer = transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)
    encoder = getattr(transformers, f"{model}EncoderModel")(config)
    return {f"text_encoder{number}": encoder, f"tokenizer{number}": tokenizer}


def llama() -> dict:
    """`LlamaModel`; hidden states `[B, tokens, FEATURES]` of the embedding and of three layers.

    Tokens are the printable ASCII characters, the word mark and HunyuanVideo's marks.
    """
    tokenizer = transformers.LlamaTokenizer(
        vocab=_ids(["<unk>", "<s>", "</s>", "▁", *CHARACTERS]),
        pad_token="</s>",
        padding_side="right",
        additional_special_tokens=[IMAGE_MARK, HEADER_END],
        model_max_length=512,
    )
    return {"text_encoder": transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)), "tokenizer": tokenizer}


def qwen(*, language_model: bool = False) -> dict:
    """`Qwen2_5_VLForConditionalGeneration`, or its language model alone, as HunyuanVideo 1.5 wants it.

    Its vision tower sees no image. The tokenizer has the 256 bytes, and its chat template is the last message itself.
    """
    vision = {"depth": 1, "num_heads": 2, "out_hidden_size": FEATURES, "fullatt_block_indexes": [0]}
    vision |= {"hidden_size": FEATURES, "intermediate_size": FEATURES}
    config = transformers.Qwen2_5_VLConfig(text_config=_QWEN, vision_config=vision)
    if language_model:
        encoder = transformers.Qwen2_5_VLTextModel(config.text_config)
    else:
        encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=_ids(["<|endoftext|>", *sorted(ByteLevel.alphabet())]),
        merges=[],
        padding_side="right",
        chat_template="{{ messages[-1]['content'] }}",
    )
    return {"text_encoder": encoder, "tokenizer": tokenizer}


def clip_vision_config():
    """Config of a model with hidden states `[B, PICTURE_TOKENS + 1, FEATURES]`, the class token first."""
    return transformers.CLIPVisionConfig(**_VISION, projection_dim=FEATURES)


def clip_image_processor():
    return transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})


def siglip() -> dict:
    """`SiglipVisionModel` and its processor; hidden states `[B, PICTURE_TOKENS, FEATURES]`."""
    return {
        "image_encoder": transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_VISION)),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE}),
    }


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}
