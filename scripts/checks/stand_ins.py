"""Small replacements for the Hub models of diffusers' tests, so that the tests run offline.

``from_pretrained`` looks for a folder of the model's name in the working directory before it asks the Hub, so tests
that run in the folder of :func:`write` load these. Tokenizers are from :mod:`tests.tiny.encoders`, one token per
character. Tests that compare with numbers of the Hub's models fail, plainly too.
"""

from pathlib import Path

from tests.tiny import encoders

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write(folder: Path) -> None:
    """Write configurations, tokenizers and weights, each into a folder named like the model on the Hub."""
    for name, parts in _parts().items():
        for part in parts:
            part.save_pretrained(folder / name)


def _parts() -> dict[str, list]:
    """Return the objects to save under each name; a model includes its configuration."""
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
