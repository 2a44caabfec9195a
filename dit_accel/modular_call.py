"""A modular pipeline of diffusers that is called like a standard one.

Its call has the inputs of its blocks for arguments, takes ``callback_on_step_end``, and returns ``images``, ``frames``
or ``audios``. The commands and the server treat it as any other pipeline.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any, get_args

import torch
from diffusers import ComponentsManager, DiffusionPipeline, ModularPipeline
from diffusers.modular_pipelines import LoopSequentialPipelineBlocks

from dit_accel.models.wrappers import denoises

INPUTS = (("prompt",), ("prompt", "image"), ("prompt", "image", "mask_image"))  # of all commands and routes
# Names of results in a standard pipeline's output, by their names in blocks.
RESULTS = {"videos": "frames", "images": "images", "audios": "audios", "audio": "audio", "sound": "sound"}


class Results(SimpleNamespace):  # whose first field is also [0]
    def __getitem__(self, index: int) -> Any:
        return list(vars(self).values())[index]


class Stopped(BaseException):
    """Ends a call after a step; diffusers would log an ``Exception``."""


class CalledAsStandard:
    """Members of a standard pipeline, for a modular pipeline's class."""

    progress_bar = DiffusionPipeline.progress_bar
    set_progress_bar_config = DiffusionPipeline.set_progress_bar_config
    blocks = property(lambda self: self._blocks)  # a copy can't have a progress bar
    name_or_path = property(lambda self: str(self._pretrained_model_name_or_path))
    makes_sound_alone = property(lambda self: "audios" in self.blocks.output_names)
    takes_images = True  # several; blocks of one image raise an error

    def enable_model_cpu_offload(self, device: torch.device) -> None:
        manager = ComponentsManager()
        for name, part in self.components.items():
            if isinstance(part, torch.nn.Module):
                manager.add(name, part)
        manager.enable_auto_cpu_offload(device=device)

    def maybe_free_model_hooks(self) -> None:
        """Do nothing: the manager moves a component when another one needs its memory."""

    def reader_of(self, name: str, kind: str) -> Callable[..., Any] | None:
        """Return what reads files of a kind, such as "video", for an input whose objects are not plain media."""
        hints = [hint for item in self.blocks.inputs if item.name == name for hint in get_args(item.type_hint)]
        kinds = [found for hint in hints if isinstance(hint, type) for found in hint.__subclasses__()]
        return next((found.from_file for found in kinds if getattr(found, "kind", None) == kind), None)

    def run_blocks(self, callback_on_step_end: Callable[..., dict[str, Any]] | None = None, **inputs: Any) -> Results:
        """Run the blocks; ``output_type="latent"`` returns the latents after the last step."""
        self._at_step_end, self._interrupt, self._latents = callback_on_step_end, False, None
        if is_latent := inputs.get("output_type") == "latent":
            del inputs["output_type"]  # few blocks know it
        try:
            state = super().__call__(**inputs)
        except Stopped:
            is_latent = True
        if is_latent:
            return Results(latents=self._latents)
        found = {name: state.get(key) for key, name in RESULTS.items()}
        if getattr(found["frames"], "ndim", 5) == 4:  # Cosmos 3 has no batch
            found["frames"] = found["frames"][None]
        return Results(**{name: value for name, value in found.items() if value is not None})

    def run_step(self, step: Callable[..., Any], _: Any, state: Any, **place: Any) -> tuple[Any, Any]:
        """Run a step of a loop of blocks, and pass its latents on to the call's callback."""
        _, state = step(self, state, **place)
        self._latents = getattr(state, "latents", None)
        if self._at_step_end is not None:
            index, time, *_ = *place.values(), None
            changed = self._at_step_end(self, index, time, {"latents": self._latents})
            self._latents = state.latents = changed.get("latents", self._latents)
        if self._interrupt:
            raise Stopped
        return self, state


def load_modular(source: str, inputs: Collection[str] = (), **dtype: torch.dtype) -> Any:
    """Load a modular pipeline from a folder or the Hub, called like a standard one, without code of its repository.

    A transformer that no run from prompt, image, mask and the further ``inputs`` uses stays on the disk: MiniMax-H3's
    ``transformer_ref``, or its ``transformer`` if ``references`` are among the inputs.

    Raises:
        ValueError: the blocks are code of the repository, or a component can't be loaded.
    """
    logging.getLogger(ModularPipeline.__module__).setLevel(logging.CRITICAL)  # it logs exceptions that it raises too
    pipe = ModularPipeline.from_pretrained(source, trust_remote_code=False)
    chosen = [pipe.blocks.get_execution_blocks(**dict.fromkeys((*names, *inputs), True)) for names in INPUTS]
    used = {name for blocks in chosen for name in blocks.component_names}
    for name in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(name)
        is_spared = name not in used and spec.type_hint is not None and denoises(spec.type_hint)
        if spec.pretrained_model_name_or_path and not is_spared:
            pipe.update_components(**{name: spec.load(**dtype)})
    if getattr(pipe, "requires_safety_checker", False):
        pipe.enable_safety_checker()
    return called_as_standard(pipe)


def called_as_standard(pipe: ModularPipeline) -> Any:
    """Return the pipeline itself, which is then called like a standard one."""
    pipe._blocks = pipe.blocks  # a copy: pipelines of a class share blocks

    def call(self: Any, **inputs: Any) -> Results:
        return self.run_blocks(**inputs)

    call.__signature__ = _signature(pipe._blocks, pipe._blocks.get_execution_blocks(prompt=True))  # type: ignore[attr-defined]
    kind = type(pipe)
    pipe.__class__ = type(kind.__name__, (CalledAsStandard, kind), {"__call__": call, "__module__": kind.__module__})
    for loop in set(_loops(pipe.blocks)):
        loop.loop_step = partial(pipe.run_step, loop.loop_step)
        loop.progress_bar = lambda *args, **kwargs: pipe.progress_bar(*args, **kwargs)  # the one at the time of a call
    return pipe


def _signature(blocks: Any, of_prompt: Any) -> Signature:
    """Return the inputs of blocks as arguments; those without which a prompt does not run have no default."""
    inputs = {item.name: item.default for item in blocks.inputs if item.name}
    needed = {item.name for item in of_prompt.inputs if item.required and item.default is None}
    if "image" in inputs and any(name.startswith("image") for name in needed):  # embeddings or latents of an image
        needed = {"image"} | {name for name in needed if not name.startswith("image_")}
    inputs |= {"callback_on_step_end": None} | dict.fromkeys(needed, Parameter.empty)
    arguments = [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in inputs.items()]
    return Signature([Parameter("self", Parameter.POSITIONAL_ONLY), *arguments])


def _loops(blocks: Any) -> Iterator[Any]:
    if isinstance(blocks, LoopSequentialPipelineBlocks):
        yield blocks
    else:
        for block in blocks.sub_blocks.values():
            yield from _loops(block)
