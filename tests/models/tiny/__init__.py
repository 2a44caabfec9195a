"""Tiny pipelines that are called with embeddings instead of prompts, so that no text encoder has to be built.

They are built once and shared by all tests; after each test :func:`require_unchanged` looks at those that it used.
"""

import copy
import functools

import diffusers
import torch
from torch.utils._pytree import tree_map_only

from dit_accel import accelerate_pipeline, restore_pipeline
from tests.models.tiny import images, others, videos
from tests.tiny import TINY_PIPELINES, tiny_output, tiny_pipeline

STEPS = 16
PIPELINES = {
    "z-image": images.z_image,
    "hidream": images.hidream,
    "prx": images.prx,
    "chroma": images.chroma,
    "longcat-image": images.longcat_image,
    "hunyuan-image": images.hunyuan_image,
    "krea2": images.krea2,
    "ernie-image": images.ernie_image,
    "flux3": images.flux3,
    "glm-image": images.glm_image,
    "ideogram4": images.ideogram4,
    "flux2": images.flux2,
    "qwen-image-edit": images.qwen_image_edit,
    "qwen-image-21": images.qwen_image_21,
    "lumina2": images.lumina2,
    "kandinsky5": videos.kandinsky5,
    "ltx2": videos.ltx2,
    "cosmos3": videos.cosmos3,
    "cogvideox-dpm": videos.cogvideox,
    "wan-vace": videos.wan_vace,
    "wan-animate": videos.wan_animate,
    "skyreels-v2": videos.skyreels_v2,
    "helios": videos.helios,
    "minimax-h3": videos.minimax_h3_whole,
    "anyflow-far": videos.anyflow_far,
    "diffusion-forcing": videos.diffusion_forcing,
}


FIRST = {}  # state of each shared pipeline as it was built
USED = {}  # shared pipelines that the current test used


def shared(build):
    """Build the pipeline of each name once, and note which ones a test uses."""
    produced = functools.cache(build)

    @functools.wraps(build)
    def get(name: str):
        result = produced(name)
        pipe = result[0] if isinstance(result, tuple) else result
        USED[name] = pipe
        if name not in FIRST:
            FIRST[name] = state_of(pipe)
        return result

    return get


@torch.no_grad()
def state_of(pipe) -> dict:
    """Return the attributes, hooks, modes and weights that acceleration, adapters and patches change."""
    state = {"accelerated": hasattr(pipe, "dit_accel")}
    for part, model in pipe.components.items():
        if isinstance(model, torch.nn.Module) and part.startswith("transformer"):
            modules = [(set(vars(item)), len(item._forward_hooks), item.training) for item in model.modules()]
            state[part] = modules, [float(item) for item in torch._foreach_norm([*model.parameters()])]
        elif isinstance(model, torch.nn.Module):  # libraries keep caches in private attributes of these
            state[part] = {key for key in vars(model) if not key.startswith("_")}
    return state


def require_unchanged() -> None:
    """Raise an AssertionError if the current test left anything on a shared pipeline."""
    for module in (module for pipe in USED.values() for module in pipe.components.values()):
        # A call of diffusers' `cache_context` leaves an empty registry, which restoring a pipeline removes.
        if hasattr(module, "_diffusers_hook") and not module._diffusers_hook.hooks:
            del module._diffusers_hook
    found, first = {name: state_of(pipe) for name, pipe in USED.items()}, {name: FIRST[name] for name in USED}
    FIRST.update(found)  # later tests are not to blame
    USED.clear()
    assert found == first, "the test left something on a shared pipeline"


@shared
def built(name: str):
    """A tiny pipeline in evaluation mode, and the arguments of its call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, arguments = PIPELINES[name]() if name in PIPELINES else others.build(name)
        for part in vars(pipe).values():
            if isinstance(part, torch.nn.Module):
                part.eval()
                for parameter in part.parameters():
                    torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    pipe.set_progress_bar_config(disable=True)
    return pipe, arguments


def moved(pipe, arguments: dict, device: torch.device | str, dtype: torch.dtype) -> dict:
    """Move a pipeline in place, with the weights in float32 that ``from_pretrained`` keeps so; return its arguments."""
    pipe.to(device, dtype)
    for part in pipe.components.values():
        kept = getattr(part, "_keep_in_fp32_modules", None) or ()
        for name, parameter in part.named_parameters() if kept else ():
            if not set(kept).isdisjoint(name.split(".")):
                parameter.data = parameter.data.float()
    return tree_map_only(
        torch.Tensor, lambda inputs: inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype), arguments
    )


def call(name: str, **changes) -> torch.Tensor:
    return outputs(*built(name), **changes)[0]


def outputs(pipe, arguments: dict, **changes) -> tuple:
    """All outputs of a pipeline of :func:`built`; a modular one gives its latents alone."""
    generator = torch.Generator().manual_seed(0)
    size = {"height": 96, "width": 96, "num_inference_steps": STEPS, "output_type": "latent"}
    inputs = {**size, **arguments, **changes, "generator": generator}
    if isinstance(pipe, diffusers.ModularPipeline):
        del inputs["output_type"]
        return (pipe(**inputs, output="latents"),)
    return pipe(**inputs, return_dict=False)


pipeline_of_testing = shared(tiny_pipeline)


def pipeline(name: str):
    """A tiny pipeline from here or from `tests.tiny`, the same each time."""
    return pipeline_of_testing(name) if name in TINY_PIPELINES else built(name)[0]


def copy_of(name: str):
    """A copy of a tiny pipeline, which a test may change."""
    return copy.deepcopy(pipeline(name))


def output(name: str, steps: int, pipe=None, **arguments) -> torch.Tensor:
    """Latents of the shared pipeline of that name, or of another one; several outputs are in one vector."""
    pipe = pipe or pipeline(name)
    if name in TINY_PIPELINES:
        return tiny_output(pipe, name, steps=steps, **arguments)
    produced = outputs(pipe, built(name)[1] | {"num_inference_steps": steps} | arguments)
    return produced[0] if len(produced) == 1 else torch.cat([item.flatten() for item in produced])


def accelerated_output(name: str, preset, steps: int, pipe=None, **arguments) -> tuple:
    """Latents of an accelerated run, and its report; the pipeline is restored afterwards."""
    pipe = accelerate_pipeline(pipe or pipeline(name), preset)
    try:
        return output(name, steps, pipe, **arguments), pipe.dit_accel.report()
    finally:
        restore_pipeline(pipe)
