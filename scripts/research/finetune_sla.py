#!/usr/bin/env python3
"""Swap SLA into a diffusers pipeline and fine-tune it, on a teacher's velocities or by flow matching on videos.

    python -m scripts.research.finetune_sla --output TUNED --model demo-wan  # matches the dense teacher
    python -m scripts.research.finetune_sla --output TUNED --model demo-wan --objective flow  # on rendered videos
    python -m scripts.research.finetune_sla --output TUNED --model PATH --prompts PROMPTS.txt \
        --call '{"num_frames": 81}'
    python -m scripts.research.finetune_sla --output TUNED --model PATH --prompts PROMPTS.txt --train lora --checkpoint
    accelerate launch -m scripts.research.finetune_sla --output TUNED ...                         # on several GPUs
    python -m scripts.research.finetune_sla --output TUNED --model demo-wan --judge 24  # against the dense model
    python -m scripts.research.finetune_sla --table --output docs/results/sla-demo-wan  # SLA's table 2
    python -m scripts.research.finetune_sla --table --model demo-flux --output docs/results/sla-demo-flux  # and table 3

Writes TUNED/transformer, a plain diffusers model, and TUNED/sla.safetensors, for preset key skip.projection:

    pipe.transformer = WanTransformer3DModel.from_pretrained("TUNED/transformer", dtype=torch.bfloat16)
    accelerate_pipeline(pipe, "wan21-sla", **{"skip.projection": "TUNED/sla.safetensors"})

With --train lora, TUNED is a LoRA for pipe.load_lora_weights("TUNED") instead of the transformer.

The same command resumes after --minutes stopped it. The teacher runs on the prompts first, and part of its calls stay
on the device; flow matching is for the demo video models, which render their own data.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline
from peft import LoraConfig
from torch import nn

from dit_accel.models import denoisers
from dit_accel.sla.swap import load_swapped, save_swapped, swap_attention
from dit_accel.sparse.projections import PROJECTIONS, trained_with
from dit_accel.tools.demo import demo_arguments, demo_path
from dit_accel.tools.measure.origin import describe_run
from scripts.demo_training.flow import PROMPT_DROPOUT
from scripts.demo_training.loading import load
from scripts.demo_training.training import configure_torch
from scripts.research.finetuning.calls import Calls, clip_calls, record_calls
from scripts.research.finetuning.judging import hold_out, judge, paint
from scripts.research.finetuning.subjects import SUBJECTS, Clips
from scripts.research.finetuning.table import FULL, SMOKE, rows, table
from scripts.research.finetuning.training import LOG, Training, fine_tune
from scripts.research.finetuning.variants import VARIANTS
from scripts.tables import as_json, write_table

DRAWN = [name for name, subject in SUBJECTS.items() if isinstance(subject, Clips)]  # can train on their videos


def main() -> None:
    options, parser = _options()
    device = PartialState(cpu=options.device == "cpu").device  # of this process, if accelerate started several
    if device.type == "cuda":
        configure_torch()
        torch.backends.cudnn.benchmark = False  # shapes repeat too rarely for it to help
    for wanted in ("table", "judge"):
        if getattr(options, wanted) and options.model not in SUBJECTS:
            parser.error(f"--{wanted} needs a demo model: {', '.join(SUBJECTS)}")
    if options.table:
        make_table(options, device)
        return
    if options.judge:
        judge_one(options, device)
        return
    if options.model not in DRAWN and options.objective == "flow":
        parser.error(f"--objective flow needs a model with rendered videos: {', '.join(DRAWN)}")
    if options.model not in SUBJECTS and options.prompts is None:
        parser.error(f"--prompts is required except for the demo models {', '.join(SUBJECTS)}")
    train_one(options, device)


def train_one(options: argparse.Namespace, device: torch.device) -> None:
    """Fine-tune one model and save it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = load(demo_path(options.model) or options.model, dtype).to(device)
    if len(denoisers(pipe)) != 1:
        raise SystemExit(f"{type(pipe).__name__} has {len(denoisers(pipe))} transformers; this script trains one")
    calls = gather_calls(pipe, options).to(device, dtype)
    print(f"{len(calls)} calls", flush=True)
    pipe.transformer.requires_grad_(options.train == "all")
    if options.train == "lora":
        layers = [name for name, layer in pipe.transformer.named_modules() if isinstance(layer, nn.Linear)]
        layers = [name for name in layers if "blocks." in name]
        pipe.transformer.add_adapter(LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=layers))
        for weight in (weight for weight in pipe.transformer.parameters() if weight.requires_grad):
            weight.data = weight.data.to(pipe.transformer.dtype)
    swap_attention(
        pipe,
        critical=options.critical,
        negligible=options.negligible,
        feature_map=options.feature_map,
        block=options.block,
    )
    if options.checkpoint:
        pipe.transformer.enable_gradient_checkpointing()
    training = Training(
        options.steps,
        options.batch,
        options.rate,
        projection_rate=options.projection_rate,
        seed=options.seed,
        minutes=options.minutes,
    )
    log = fine_tune(pipe.transformer, calls, training, options.output)
    if PartialState().is_main_process:
        save_swapped(pipe, options.output)
        print(f"{log['steps']} of {options.steps} steps; wrote {options.output}", flush=True)


def judge_one(options: argparse.Namespace, device: torch.device) -> None:
    """Compare a demo model with SLA to the dense one, before and after fine-tuning, on held-out prompts."""
    subject, folder = SUBJECTS[options.model], demo_path(options.model)
    call = {**demo_arguments(folder), **json.loads(options.call)}
    pipe = load(folder, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    held_out = hold_out(subject, pipe, options.judge, call)
    settings = trained_with(options.output / PROJECTIONS)
    figures = {"settings": settings, "call": call, "dense": judge(pipe, held_out.dense, held_out)}
    swap_attention(pipe, **settings)
    figures["before"] = judge(pipe, paint(subject, pipe, held_out.prompts, call), held_out)
    load_swapped(pipe, options.output)
    figures["after"] = judge(pipe, paint(subject, pipe, held_out.prompts, call), held_out)
    log = options.output / LOG
    figures |= {"training": json.loads(log.read_text())} if log.exists() else {}
    (options.output / "judged.json").write_text(json.dumps(figures | describe_run(device)) + "\n")


def gather_calls(pipe: DiffusionPipeline, options: argparse.Namespace) -> Calls:
    """Gather the training data of the objective."""
    folder = demo_path(options.model)
    call = {**(demo_arguments(folder) if folder else {}), **json.loads(options.call)}
    if options.objective == "flow":
        prompts, numbers = SUBJECTS[options.model].draw(options.clips, options.seed)
        dropped = ["" if index % round(1 / PROMPT_DROPOUT) == 0 else prompt for index, prompt in enumerate(prompts)]
        return clip_calls(SUBJECTS[options.model].family, pipe, dropped, numbers, call)
    if options.prompts:
        prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        prompts, _ = SUBJECTS[options.model].draw(options.clips, options.seed)
    return record_calls(pipe, prompts, call, share=options.share, batch=options.paint_batch, seed=options.seed)


def make_table(options: argparse.Namespace, device: torch.device) -> None:
    """Train and evaluate all variants; write the figures after each."""
    sizes = SMOKE if options.smoke else FULL
    sizes = replace(sizes, variants=tuple(options.variants)) if options.variants else sizes
    document = {"sizes": asdict(sizes), **describe_run(device), "rows": []}
    document["sizes"]["training"]["minutes"] = None  # infinite, which JSON does not know
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(SUBJECTS[options.model], demo_path(options.model), sizes, device, Path(folder)):
            document["rows"].append(row)
            options.output.with_suffix(".json").write_text(as_json(document), encoding="utf-8")
    write_table(options.output.with_suffix(".md"), table(document["rows"]) + "\n")
    print(table(document["rows"]))


def _options() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder; with --table the stem of .json and .md")
    parser.add_argument("--model", default="demo-wan", help="a demo model, or path or id of a pipeline")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    sla = parser.add_argument_group("attention")
    sla.add_argument("--critical", type=float, default=0.05, help="share of critical tiles")
    sla.add_argument("--negligible", type=float, default=0.10, help="share of negligible tiles")
    sla.add_argument("--feature-map", choices=["softmax", "elu", "relu"], default="softmax")
    sla.add_argument("--block", type=int, choices=[64, 128], default=64)
    data = parser.add_argument_group("data")
    data.add_argument("--objective", choices=["teacher", "flow"], default="teacher")
    data.add_argument("--prompts", type=Path, help="text file, one prompt per line; demo models generate prompts")
    data.add_argument("--clips", type=int, default=256, help="number of prompts or videos from a demo model")
    data.add_argument("--call", default="{}", help="JSON of arguments of the pipeline's call")
    data.add_argument("--share", type=float, default=0.25, help="kept share of the teacher's calls")
    data.add_argument("--paint-batch", type=int, default=16, help="prompts per batch of the teacher")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=2000)
    training.add_argument("--batch", type=int, default=16)
    training.add_argument(
        "--rate", type=float, default=5e-4, help="learning rate of AdamW; orthogonalised steps use twice this rate"
    )
    training.add_argument(
        "--projection-rate", type=float, default=10.0, help="rate of projections as a multiple of the matrices'"
    )
    training.add_argument("--minutes", type=float, default=float("inf"), help="time limit; run again to resume")
    training.add_argument("--train", choices=["all", "lora", "projections"], default="all")
    training.add_argument("--rank", type=int, default=32, help="rank of the LoRA")
    training.add_argument("--checkpoint", action="store_true", help="gradient checkpointing, for large models")
    table = parser.add_argument_group("table")
    table.add_argument(
        "--judge", type=int, metavar="N", help="evaluate --output on N held-out prompts, into its judged.json"
    )
    table.add_argument("--table", action="store_true", help="compare all variants, before and after fine-tuning")
    table.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=[], help="variants in the table")
    table.add_argument("--smoke", action="store_true", help="quick test: two variants for two steps, on any CPU")
    return parser.parse_args(), parser


if __name__ == "__main__":
    main()
