"""Tiny pipelines that make videos."""

import copy
import functools
from types import SimpleNamespace

import diffusers
import torch
from transformers import CLIPVisionModel

from tests.models.tiny.parts import TOKENS, WIDTH, flow, prompts, small, text
from tests.tiny import encoders, tiny_pipeline
from tests.tiny.families import SIZES
from tests.tiny.inputs import random_picture

H3_SHIFTS = {"": 12.0, "audio_": 3.0}
H3_VIDEO, H3_AUDIO = (24, 16), (10, 8)  # tokens and channels of MiniMax-H3's latents


def kandinsky5():
    """Latents ``[B, F, H, W, C]``, and text in separate blocks."""
    transformer = small("Kandinsky5Transformer3DModel")
    pipe = diffusers.Kandinsky5T2VPipeline(transformer, None, None, None, None, None, flow(shift=3.0))
    prompt = prompts(prompt_embeds_qwen=(1, TOKENS, WIDTH), prompt_embeds_clip=(1, WIDTH))
    lengths = dict.fromkeys(("prompt_cu_seqlens", "negative_prompt_cu_seqlens"), torch.tensor([0, TOKENS]))
    return pipe, {**prompt, **lengths, "height": 128, "width": 96, "num_frames": 9}


def ltx2():
    """A video and a sound track; the tokens of either attend to the other's."""
    transformer = small("LTX2VideoTransformer3DModel")
    connector = {"num_attention_heads": 2, "attention_head_dim": WIDTH // 2, "num_layers": 1}
    connectors = diffusers.pipelines.ltx2.LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=1,
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in connector.items()},
        video_connector_num_learnable_registers=None,
        audio_connector_num_learnable_registers=None,
    )
    vae = tiny_pipeline("ltx").vae
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=32, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2
    )
    vocoder = diffusers.pipelines.ltx2.LTX2Vocoder(128, 8, 2, [4], [2], [3], [[1]])
    scheduler = flow(use_dynamic_shifting=True)
    pipe = diffusers.LTX2Pipeline(scheduler, vae, audio_vae, None, None, connectors, transformer, vocoder)
    prompt = {"spatio_temporal_guidance_blocks": [1], "stg_scale": 0.0, "audio_stg_scale": 0.0, "modality_scale": 1.0}
    prompt["audio_modality_scale"] = 1.0
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    masks = dict.fromkeys(("prompt_attention_mask", "negative_prompt_attention_mask"), mask)
    prompt |= {**prompts(prompt_embeds=(1, TOKENS, WIDTH)), **masks}
    return pipe, {**prompt, "height": 32, "width": 96, "num_frames": 5}


def minimax_h3(name="transformer"):
    """The denoising loop of MiniMax-H3, a modular pipeline: video and audio have schedules of their own.

    Its transformer is the component `name`, `transformer_ref` for videos with references. The arguments leave latents
    out, because the pipeline changes them in place.
    """
    from diffusers.modular_pipelines import SequentialPipelineBlocks
    from diffusers.modular_pipelines.minimax_h3 import before_denoise, denoise

    loop = {"transformer": denoise.MiniMaxH3DenoiseStep, "transformer_ref": denoise.MiniMaxH3Ref2VADenoiseStep}[name]
    steps = {"set_timesteps": before_denoise.MiniMaxH3SetTimestepsStep(), "denoise": loop()}
    pipe = SequentialPipelineBlocks.from_blocks_dict(steps).init_pipeline()
    transformer = small("MiniMaxH3Transformer3DModel", in_channels=4, audio_in_channels=8)
    schedulers = {f"{kind}scheduler": diffusers.MiniMaxH3Scheduler(shift) for kind, shift in H3_SHIFTS.items()}
    pipe.update_components(**{name: transformer}, **schedulers)
    modalities = torch.tensor([1] * TOKENS + [0] * H3_VIDEO[0] + [2] * H3_AUDIO[0])
    layout = {"token_tags": modalities, "position_ids": torch.arange(len(modalities))[:, None].expand(-1, 3)}
    kinds = ("video", "text", "audio")
    indices = {f"{kind}_indices": (modalities == tag).nonzero()[:, 0] for tag, kind in enumerate(kinds)}
    return pipe, {"prompt_embeds": text(1, TOKENS, WIDTH), **indices, "denoiser_input_fields": layout | indices}


class StepScheduler(diffusers.MiniMaxH3Scheduler):
    """Takes the number of steps, while diffusers' own counts the end of the run too."""

    def set_timesteps(self, num_inference_steps, **settings):
        super().set_timesteps(num_inference_steps + 1, **settings)


def minimax_h3_whole():
    """All of its steps with latents, which make 148 tokens of video and 414 of audio."""
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep

    pipe = MiniMaxH3CoreDenoiseStep().init_pipeline()
    schedulers = {f"{kind}scheduler": StepScheduler(shift) for kind, shift in H3_SHIFTS.items()}
    pipe.update_components(transformer=small("MiniMaxH3Transformer3DModel"), **schedulers)
    prompt = {"prompt_embeds": text(1, TOKENS, WIDTH), "text_token_tags": torch.ones(TOKENS, dtype=torch.long)}
    return pipe, {**prompt, "height": 64, "width": 64, "num_frames": 124}


class SixTokens:
    """Replaces Cosmos 3's tokenizer: each prompt has four tokens and two special ones."""

    eos_token_id = 1

    def convert_tokens_to_ids(self, token):
        return 2

    def apply_chat_template(self, messages, **settings):
        return SimpleNamespace(input_ids=[3, 4, 5, 6])


class PlainSound(diffusers.ModelMixin):
    """Replaces Cosmos 3's decoder of sound, which then returns its latents."""

    config, _hop_size = SimpleNamespace(sampling_rate=16000), 160

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def decode(self, latents):
        return latents


def cosmos3():
    """A video with sound, which have ``vision_timesteps`` and ``sound_timesteps`` instead of one timestep."""
    transformer = small("Cosmos3OmniTransformer")
    steps = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    scheduler = diffusers.UniPCMultistepScheduler(**steps)
    pipe = diffusers.Cosmos3OmniPipeline(
        transformer, SixTokens(), tiny_pipeline("wan").vae, scheduler, PlainSound(), enable_safety_checker=False
    )
    size = {"height": 64, "width": 64, "num_frames": 5, "enable_safety_check": False, "enable_sound": True}
    return pipe, {"prompt": "a red fox", **size}


def cogvideox():
    """Under a scheduler that keeps the index of its step, as CogVideoX's own do not."""
    pipe = tiny_pipeline("cogvideox")
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
    size = {"height": 64, "width": 56, "num_frames": 9, "max_sequence_length": 37}
    return pipe, {"prompt": "a red fox", **size}


output = functools.cache(tiny_pipeline)


def wan_parts() -> dict:
    """An autoencoder and a scheduler of the caller's own: building a pipeline draws all its weights again."""
    return {part: copy.deepcopy(output("wan").components[part]) for part in ("vae", "scheduler")}


WAN = {**SIZES, "num_attention_heads": 2, "text_dim": WIDTH, "ffn_dim": 128, "rope_max_seq_len": 64}
WAN_CALL = {**prompts(prompt_embeds=(1, TOKENS, WIDTH)), "height": 64, "width": 48, "guidance_scale": 5.0}


def wan_vace():
    """Separate blocks make hints for some of Wan's."""
    transformer = diffusers.WanVACETransformer3DModel(
        **WAN, in_channels=16, out_channels=16, vace_layers=[0], vace_in_channels=48
    )
    vae, scheduler = wan_parts().values()
    return diffusers.WanVACEPipeline(None, None, vae, scheduler, transformer), {**WAN_CALL, "num_frames": 5}


def wan_animate():
    """Faces of another video are attended to between blocks."""
    transformer = small("WanAnimateTransformer3DModel")
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[True, True], scale_factor_spatial=4
    )
    eye = encoders.clip_image_processor(), CLIPVisionModel(encoders.clip_vision_config())
    pipe = diffusers.WanAnimatePipeline(None, None, vae, wan_parts()["scheduler"], *eye, transformer)
    frame = random_picture(torch.Generator().manual_seed(0), 64, 48)
    clip = {"image": frame, "pose_video": [frame] * 9, "face_video": [frame] * 9, "segment_frame_length": 9}
    return pipe, {**WAN_CALL, **clip}


def helios():
    """One part of a video, which follows its history in three resolutions."""
    transformer = small("HeliosTransformer3DModel")
    pipe = diffusers.HeliosPipeline(
        None, None, wan_parts()["vae"], diffusers.HeliosScheduler(stages=1, stage_range=[0, 1]), transformer
    )
    part = {"num_latent_frames_per_chunk": 2, "num_frames": 3, "history_sizes": [4, 2, 1]}
    return pipe, {**WAN_CALL, "height": 48, "width": 48, **part}


def skyreels_v2():
    transformer = diffusers.SkyReelsV2Transformer3DModel(**WAN, in_channels=16, out_channels=16)
    vae, scheduler = wan_parts().values()
    return diffusers.SkyReelsV2Pipeline(None, None, transformer, vae, scheduler), {**WAN_CALL, "num_frames": 5}


def diffusion_forcing():
    """Each latent frame has its own copy of the scheduler and its own timesteps; the pipeline's own takes no step."""
    parts = tiny_pipeline("wan").components
    transformer = diffusers.SkyReelsV2Transformer3DModel(
        **SIZES, in_channels=16, out_channels=16, text_dim=WIDTH, ffn_dim=192, rope_max_seq_len=64
    )
    pipe = diffusers.SkyReelsV2DiffusionForcingPipeline(
        parts["tokenizer"], parts["text_encoder"], transformer, parts["vae"], parts["scheduler"]
    )
    prompt = {"prompt": "a red fox", "max_sequence_length": 37}
    return pipe, {**prompt, "height": 64, "width": 48, "num_frames": 5, "base_num_frames": 5, "num_inference_steps": 8}


def anyflow_far():
    """A video is made chunk by chunk; each call returns its keys and values with its prediction."""
    transformer = small("AnyFlowFARTransformer3DModel")
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = diffusers.FlowMapEulerDiscreteScheduler(num_train_timesteps=1000, shift=5.0)
    pipe = diffusers.AnyFlowFARPipeline(None, None, transformer, vae, scheduler)
    prompt = {"prompt_embeds": text(1, TOKENS, WIDTH), "guidance_scale": 1.0}
    return pipe, {**prompt, "height": 64, "width": 64, "num_frames": 9}
