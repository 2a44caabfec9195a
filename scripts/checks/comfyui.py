#!/usr/bin/env python3
"""Run the ComfyUI nodes inside a ComfyUI checkout, with the trained demo-flux as the model; takes minutes on a CPU.

    python -m scripts.checks.comfyui ~/ComfyUI --output comfyui.json

The Python that runs this needs ComfyUI's requirements and dit-accel's. ComfyUI's own FLUX gets the demo model's
weights. Its samplers make each image without and with the node, and diffusers' VAE decodes both. Checks: the plain
image equals diffusers'; preset `exact` gives it bit for bit; samplers with one call per step skip steps and stay close
to the plain image; all others run plainly, and the report says why.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FluxPipeline

from dit_accel.tools.demo import demo_arguments, demo_path, tuning_prompts
from dit_accel.tools.measure.metrics import psnr
from dit_accel.tools.measure.origin import describe_run
from scripts.tables import write_result

NODES = Path(__file__).parents[2] / "integrations" / "comfyui"
ACCELERATED = ("euler", "ddim", "dpmpp_2m", "uni_pc", "res_multistep", "deis", "ipndm", "lms", "euler_cfg_pp")
PLAIN = ("heun", "dpm_2", "euler_ancestral", "dpmpp_2m_sde", "lcm", "dpm_adaptive")
LEAST_PSNR = 28.0  # of an image that counts as close
SEED = 5


def main() -> int:
    options = _options()
    sys.path.insert(0, str(options.comfyui.resolve()))
    from comfy.cli_args import args

    args.cpu = not torch.cuda.is_available()
    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    check = Check(options.steps, options.size)
    results = {**describe_run("cuda" if torch.cuda.is_available() else "cpu"), "comfyui": _version(), "rows": []}
    for row in check.rows():
        results["rows"].append(row)
        print(json.dumps(row), flush=True)
        write_result(options.output, results)
    bad = [row["check"] for row in results["rows"] if not row["passed"]]
    print("failed: " + ", ".join(bad) if bad else "all passed")
    return len(bad) > 0


class Check:
    """The demo model in diffusers and in ComfyUI, with one prompt and its noise; images have `size` pixels a side."""

    def __init__(self, steps: int, size: int) -> None:
        folder = demo_path("demo-flux")
        self.pipe = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.arguments = {**demo_arguments(folder), "height": size, "width": size, "num_inference_steps": steps}
        self.prompt = tuning_prompts("demo-flux")[0]
        self.side = 2 * (size // (2 * self.pipe.vae_scale_factor))
        self.noise = torch.randn(1, 16, self.side, self.side, generator=torch.Generator().manual_seed(SEED))
        self.model = comfy_flux(self.pipe.transformer)
        spec = importlib.util.spec_from_file_location("dit_accel_nodes", NODES / "__init__.py")
        self.nodes = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.nodes)
        packed = self.pipe._pack_latents(self.noise, 1, 16, self.side, self.side)
        self.by_diffusers = self.pipe(self.prompt, latents=packed, output_type="np", **self.arguments).images[0]
        self.sigmas = self.pipe.scheduler.sigmas.clone()
        self.wanted = self._conditions(self.prompt, slice(None))

    def rows(self) -> Any:
        """Yield one row per check, each with ``passed``."""
        plain, _ = self.sample(self.model, "euler")
        near = psnr(self.picture(plain), self.by_diffusers)
        yield {"check": "ComfyUI's plain image is diffusers'", "psnr": near, "passed": near > 45}
        exact, _ = self.sample(self.accelerated("exact"), "euler")
        yield {"check": "exact is bit for bit the plain run", "passed": torch.equal(plain, exact)}
        for sampler in ACCELERATED:
            yield self.row(sampler, sampler)
        for name, tokens in (("both branches in one batch", slice(None)), ("branches apart", slice(32))):
            yield self.row(f"euler with guidance, {name}", "euler", self._conditions("", tokens), 2.0)
        for sampler in PLAIN:
            plain, _ = self.sample(self.model, sampler)
            again, report = self.sample(self.accelerated("balanced"), sampler)
            passed = torch.equal(plain, again) and any(f"sampler {sampler}" in note for note in report.notes)
            yield {"check": f"{sampler} runs plainly", "notes": report.notes, "passed": passed}

    def row(self, name: str, sampler: str, unwanted: list | None = None, guidance: float = 1.0) -> dict[str, Any]:
        """Run one sampler, plainly and with preset balanced."""
        plain, _ = self.sample(self.model, sampler, unwanted, guidance)
        latents, report = self.sample(self.accelerated("balanced"), sampler, unwanted, guidance)
        near = psnr(self.picture(plain), self.picture(latents))
        facts = {"computed": round(report.computed_fraction, 3), "psnr": round(near, 1), "notes": report.notes}
        return {"check": name, **facts, "passed": near >= LEAST_PSNR and report.computed_fraction < 0.9}

    def accelerated(self, preset: str) -> Any:
        """Return the model behind the node."""
        node = self.nodes.NODE_CLASS_MAPPINGS["DitAccel"]()
        return node.accelerate(self.model, preset, target_error=0.0, warmup=-1)[0]

    def sample(self, model: Any, sampler: str, unwanted: list | None = None, guidance: float = 1.0) -> tuple:
        """Return the latents of one run, and the report of an accelerated model."""
        import comfy.sample
        import comfy.samplers

        sampler = comfy.samplers.sampler_object(sampler)
        unwanted, sigmas = self.wanted if unwanted is None else unwanted, self.sigmas.clone()
        torch.manual_seed(SEED)  # for samplers that add noise
        empty = torch.zeros_like(self.noise)
        with torch.inference_mode():
            latents = comfy.sample.sample_custom(
                model, self.noise, guidance, sampler, sigmas, self.wanted, unwanted, empty, seed=SEED, disable_pbar=True
            )
        loop = model.get_attachment("dit_accel")
        return latents, None if loop is None else loop.report()

    @torch.no_grad()
    def picture(self, latents: torch.Tensor) -> Any:
        vae = self.pipe.vae
        decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return self.pipe.image_processor.postprocess(decoded, output_type="np")[0]

    @torch.no_grad()
    def _conditions(self, prompt: str, tokens: slice) -> list:
        """Return a prompt in ComfyUI's form; with fewer tokens it needs a call of its own."""
        length = self.arguments["max_sequence_length"]
        embeddings, pooled, _ = self.pipe.encode_prompt(prompt, None, max_sequence_length=length)
        return [[embeddings[:, tokens], {"pooled_output": pooled}]]


def comfy_flux(transformer: torch.nn.Module) -> Any:
    """Build ComfyUI's FLUX with the weights of diffusers'."""
    import comfy.latent_formats
    import comfy.model_detection
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    facts = transformer.config
    width = facts.num_attention_heads * facts.attention_head_dim
    sizes = dict.fromkeys(("in_channels", "out_channels"), facts.in_channels // 4)
    sizes |= {"vec_in_dim": facts.pooled_projection_dim, "context_in_dim": facts.joint_attention_dim}
    sizes |= {"hidden_size": width, "num_heads": facts.num_attention_heads, "axes_dim": list(facts.axes_dims_rope)}
    sizes |= {"depth": facts.num_layers, "depth_single_blocks": facts.num_single_layers, "mlp_ratio": 4.0}
    sizes |= {"theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": facts.guidance_embeds}
    config = comfy.supported_models.Flux({"image_model": "flux", **sizes})
    config.latent_format = comfy.latent_formats.LatentFormat()  # keep the latents' scale of the model
    config.set_inference_dtype(torch.float32, None)
    device = comfy.model_management.get_torch_device()
    model = config.get_model({}, device=device)
    weights = {name: weight.clone() for name, weight in transformer.state_dict().items()}
    model.diffusion_model.load_state_dict(comfy.model_detection.convert_diffusers_mmdit(weights, ""))
    return comfy.model_patcher.ModelPatcher(model, device, torch.device("cpu"))


def _version() -> str:
    from comfyui_version import __version__

    return __version__


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", type=Path, help="checkout of ComfyUI")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", type=int, default=256, help="side of the images in pixels")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
