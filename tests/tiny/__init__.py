"""Tiny diffusers pipelines with random weights, for tests: offline, on a CPU, in float32, the same for the same seed.

    pipe = tiny_pipeline("flux")
    latents = tiny_output(pipe, "flux", steps=8)

The classes are diffusers' own, so that what is tested here is what users run; only sizes and weights are not.
Weights are redrawn after construction: several models start with zeros (control nets, position frequencies) or with
ones (norms), and both hide bugs. The output therefore depends clearly on the timestep, the prompt and each block.
"""

import copy
from functools import partial

import torch
from diffusers import DiffusionPipeline
from diffusers.models.embeddings import TimestepEmbedding

from tests.tiny import families, flux, hunyuan, wan
from tests.tiny.flux import tiny_flux_lora

__all__ = ["TINY_PIPELINES", "VIDEO_PIPELINES", "redraw", "smooth_in_time", "tiny_flux_lora", "tiny_inputs"]
__all__ += ["same_weights", "tiny_output", "tiny_pipeline"]

# name: (builds the pipeline, makes the keyword arguments that are its own)
_PIPELINES = {
    "flux": (flux.build, flux.inputs),
    "flux-schnell": (partial(flux.build, guidance=False), flux.inputs),
    "flux-fill": (
        partial(flux.build, "FluxFillPipeline", in_channels=2 * flux.TOKEN_CHANNELS + flux.MASK_CHANNELS),
        flux.fill_inputs,
    ),
    "flux-control": (
        partial(flux.build, "FluxControlPipeline", in_channels=2 * flux.TOKEN_CHANNELS),
        flux.control_inputs,
    ),
    "flux-kontext": (partial(flux.build, "FluxKontextPipeline"), flux.kontext_inputs),
    "flux-controlnet": (partial(flux.build, "FluxControlNetPipeline", controlnet=True), flux.control_inputs),
    "flux-img2img": (partial(flux.build, "FluxImg2ImgPipeline"), flux.img2img_inputs),
    "flux-ip-adapter": (flux.build_ip_adapter, flux.ip_adapter_inputs),
    "sd3": (families.build_sd3, flux.inputs),
    "sd35": (partial(families.build_sd3, dual_attention_layers=(0,)), flux.inputs),
    "cogvideox": (families.build_cogvideox, families.cogvideox_inputs),
    "mochi": (families.build_mochi, families.mochi_inputs),
    "ltx": (families.build_ltx, families.ltx_inputs),
    "qwen-image": (families.build_qwen_image, families.qwen_image_inputs),
    "wan": (wan.build, wan.inputs),
    "wan-i2v": (partial(wan.build, picture=True), wan.picture_inputs),
    "wan-i2v-clip": (partial(wan.build, picture=True, image_encoder=True), wan.encoded_picture_inputs),
    "wan22": (partial(wan.build, experts=2), wan.inputs),
    "wan22-i2v": (partial(wan.build, picture=True, experts=2), wan.picture_inputs),
    "wan22-5b": (partial(wan.build, expand_timesteps=True), wan.inputs),
    "wan22-5b-i2v": (partial(wan.build, picture=True, expand_timesteps=True), wan.picture_inputs),
    "hunyuan": (hunyuan.build, hunyuan.inputs),
    "hunyuan-i2v": (partial(hunyuan.build_picture, "token_replace"), hunyuan.picture_inputs),
    "hunyuan-i2v-concat": (partial(hunyuan.build_picture, "latent_concat"), hunyuan.picture_inputs),
    "framepack": (hunyuan.build_framepack, hunyuan.framepack_inputs),
    "hunyuan15": (hunyuan.build_15, hunyuan.inputs_15),
    "hunyuan15-i2v": (partial(hunyuan.build_15, picture=True), hunyuan.picture_inputs_15),
}

TINY_PIPELINES = tuple(_PIPELINES)
VIDEO_PIPELINES = tuple(name for name in TINY_PIPELINES if name.startswith(("wan", "hunyuan", "framepack")))
PICTURE_A_PROMPT = ("hunyuan-i2v", "hunyuan-i2v-concat", "framepack")  # a batch of these wants a list of images
PROMPT = "a red fox in the winter snow"


def tiny_pipeline(name: str, *, seed: int = 0) -> DiffusionPipeline:
    """Build a pipeline in evaluation mode with weights of a seed; the global random state stays as it was."""
    build, _ = _PIPELINES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = build()
        for component in sorted(pipe.components):
            if isinstance(module := getattr(pipe, component), torch.nn.Module):
                redraw(module.eval())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_inputs(
    name: str, *, steps: int = 4, seed: int = 0, prompt: str | list[str] = PROMPT, **overrides: object
) -> dict:
    """Make arguments for one call, which advances their random generator; the result is latents by default.

    ``overrides`` replace or extend them. Conditioning images follow `height` and `width` (pixels), and HunyuanVideo
    1.5's image-to-video, which takes neither, follows its image's proportions.
    """
    _, make_inputs = _PIPELINES[name]
    generator = torch.Generator().manual_seed(seed)
    size = {side: overrides[side] for side in ("height", "width") if side in overrides}
    arguments = make_inputs(generator, **size)
    if name in PICTURE_A_PROMPT and isinstance(prompt, list):
        arguments["image"] = [arguments["image"]] * len(prompt)
    if "height" not in arguments:
        overrides = {key: value for key, value in overrides.items() if key not in size}
    usual = {"prompt": prompt, "num_inference_steps": steps, "generator": generator, "output_type": "latent"}
    return usual | arguments | overrides


def tiny_output(pipe: DiffusionPipeline, name: str, **arguments: object) -> torch.Tensor:
    """Return the result of one call of ``pipe`` with `tiny_inputs(name, **arguments)`: by default latents `[B, …]`."""
    output = pipe(**tiny_inputs(name, **arguments), return_dict=False)[0]
    return output[-1] if isinstance(output, list) else output  # Framepack's latents after each section


def same_weights(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Copy a pipeline, with modules of its own over the same weights in memory, so that both give equal bits."""
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    weights = [weight for module in modules for weight in (*module.parameters(), *module.buffers())]
    return copy.deepcopy(pipe, {id(weight): weight for weight in weights})


@torch.no_grad()
def redraw(module: torch.nn.Module) -> None:
    """Randomise matrices from N(0, 1/fan_in), which keeps activations' size, and add N(0, 0.1²) to vectors."""
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=0.1)
        else:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
    for part in module.modules():
        if isinstance(part, TimestepEmbedding):
            smooth_in_time(part.linear_1)


def smooth_in_time(linear: torch.nn.Linear) -> None:
    """Damp the fast sinusoids of the timestep, as training does; else no forecast over steps could be any good.

    Features of angular frequency w (per timestep, of 1000; both halves of the features hold the same ones) weigh
    1/(1 + 200 w): nothing then turns faster than one radian in 200 timesteps. Over 20 steps FLUX's output changes by
    7% from one to the next (44% undamped), of which linear extrapolation misses 5%.
    """
    half = linear.in_features // 2
    frequency = 10_000.0 ** (-torch.arange(half) / half)
    linear.weight.mul_((1 / (1 + 200 * frequency)).repeat(2))
