"""Small stand-ins for the models that diffusers' tests load from the Hub, so that they run offline.

``from_pretrained`` takes a folder of that name in the working directory before it asks the Hub, so tests that run in
the folder of :func:`write` get these. Tokenizers are those of :mod:`tests.tiny.encoders`, one token a
character. A test that compares with numbers that the Hub's models gave fails with them, plainly too.
"""

from __future__ import annotations

from pathlib import Path

from tests.tiny import encoders

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write(folder: Path) -> None:
    """Writes configurations, tokenizers and weights, each into a folder of its name on the Hub."""
    for name, parts in _parts().items():
        for part in parts:
            part.save_pretrained(folder / name)


def _parts() -> dict[str, list]:
    """What is loaded by each name; a model brings its configuration."""
    import transformers

    t5, clip, llama, qwen = encoders.t5(), encoders.clip(), encoders.llama(), encoders.qwen()
    for tokenizer in (llama["tokenizer"], qwen["tokenizer"]):
        tokenizer.chat_template = CHAT
    return {
        "hf-internal-testing/tiny-random-t5": [t5["text_encoder"], t5["tokenizer"]],
        "hf-internal-testing/tiny-random-T5Model": [t5["tokenizer"]],
        "hf-internal-testing/tiny-random-umt5": [encoders.t5(model="UMT5")["text_encoder"]],
        "hf-internal-testing/tiny-random-clip": [clip["text_encoder"], clip["tokenizer"]],
        "hf-internal-testing/tiny-random-Qwen2VLForConditionalGeneration": [qwen["tokenizer"]],
        "hf-internal-testing/tiny-random-SiglipVisionModel": list(encoders.siglip().values()),
        "hf-internal-testing/tiny-random-LlamaForCausalLM": [
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**encoders.LLAMA)),
            llama["tokenizer"],
        ],
        "hf-internal-testing/llama-tokenizer": [llama["tokenizer"]],
        "finetrainers/dummy-hunyaunvideo/tokenizer": [llama["tokenizer"]],
        "hf-internal-testing/dummy-gemma": [
            transformers.GemmaTokenizer(vocab=llama["tokenizer"].get_vocab(), merges=[])
        ],
    }
