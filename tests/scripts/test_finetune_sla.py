"""Fine-tuning with SLA: recorded calls, training that learns and resumes, and all steps of the table."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from dit_accel.sla.swap import swap_attention, swapped_attention
from scripts.demo_training.exporting import write_folder
from scripts.research import finetune_sla
from scripts.research.finetuning import training
from scripts.research.finetuning.calls import Calls, record_calls, velocity_error
from scripts.research.finetuning.subjects import SUBJECTS, Clips
from scripts.research.finetuning.table import SMOKE, rows, table
from scripts.research.finetuning.training import Training, fine_tune
from scripts.research.finetuning.variants import VARIANTS
from tests.tiny import tiny_inputs, tiny_pipeline

TRAINING = Training(steps=4, batch=4, rate=3e-5)


def record(pipe, name, *, share=1.0, prompts=("a fox", "two red foxes in the snow")):
    """Calls of a tiny pipeline over two steps."""
    call = tiny_inputs(name, steps=2, height=96, width=80)
    for key in ("prompt", "generator", "output_type"):
        del call[key]
    return record_calls(pipe, prompts, call, share=share, batch=2, seed=0)


@pytest.fixture
def student():
    """A tiny Wan transformer with SLA in it, and calls of its dense self."""
    pipe = tiny_pipeline("wan")
    calls = record(pipe, "wan")
    swap_attention(pipe, critical=0.3, negligible=0.2)
    return pipe.transformer, calls


@torch.no_grad()
def error_of(transformer, calls):
    return float(velocity_error(transformer, calls, torch.Generator()))


@pytest.mark.parametrize("name", ["wan", "flux", "hunyuan"])
def test_recorded_calls_can_be_made_again(name):
    """Called with the recorded arguments, in any order, the transformer returns the recorded velocities."""
    pipe = tiny_pipeline(name)
    calls = record(pipe, name)
    assert len(calls) % 4 == 0  # two prompts, two steps, and branches
    torch.testing.assert_close(
        torch.tensor(error_of(pipe.transformer, calls.rows(torch.tensor([len(calls) - 1, 0])))), torch.tensor(0.0)
    )
    assert calls.velocity.std() > 0.1
    assert not pipe.transformer._forward_hooks


def test_a_share_of_each_batch_is_kept(pipe):
    everything, half = record(pipe, "flux"), record(pipe, "flux", share=0.5)
    assert 2 * len(half) == len(everything) and error_of(pipe.transformer, half) < 1e-8


def test_flow_matching_asks_for_the_way_from_clip_to_noise():
    """A student that knows the video has no error: its velocity is (x_s − x) / s, with s as its timestep says."""
    clean = torch.randn(6, 4, 2, 3, 3)

    def student(hidden_states, timestep, return_dict):
        levels = timestep.view(-1, 1, 1, 1, 1) / 1000
        assert ((levels > 0) & (levels < 1)).all()
        return ((hidden_states - clean) / levels,)

    calls = Calls({"hidden_states": clean, "timestep": torch.zeros(6)}, None)
    assert float(velocity_error(student, calls, torch.Generator().manual_seed(0))) < 1e-8
    assert torch.equal(calls.arguments["timestep"], torch.zeros(6))


def test_training_comes_closer_to_the_teacher(student, tmp_path):
    transformer, calls = student
    before = error_of(transformer, calls)
    log = fine_tune(transformer, calls, TRAINING, tmp_path)
    assert error_of(transformer, calls) < 0.95 * before
    assert log == json.loads((tmp_path / "training.json").read_text())
    assert log["steps"] == 4 and log["settings"]["objective"] == "teacher"
    assert all(attention.projection.weight.abs().max() > 0 for attention in swapped_attention(transformer).values())


def test_projections_can_be_all_that_learns(student, tmp_path):
    transformer, calls = student
    before = {name: weight.clone() for name, weight in transformer.named_parameters()}
    transformer.requires_grad_(False)
    for attention in swapped_attention(transformer).values():
        attention.projection.requires_grad_(True)
    fine_tune(transformer, calls, replace(TRAINING, steps=2), tmp_path)
    changed = {name for name, weight in transformer.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if name.endswith("projection.weight")}


def test_a_training_ends_in_time(student, tmp_path):
    transformer, calls = student
    log = fine_tune(transformer, calls, Training(steps=10_000, batch=1, rate=1e-5, seconds=1.0), tmp_path)
    assert 0 < log["steps"] < 10_000 and log["seconds"] < 60
    budget = training.Budget(Training(steps=10_000, batch=1, rate=1.0, seconds=200.0), {**log, "seconds": 100.0})
    assert 0.4 < budget.rate < 0.6  # half of the time, hardly any of the steps


def test_an_interrupted_training_goes_on(student, tmp_path, monkeypatch):
    """Stopped halfway and started again it ends with the weights of one that was not stopped."""
    monkeypatch.setattr(training, "LOOK_EVERY", 2)
    transformer, calls = student
    start = {name: value.clone() for name, value in transformer.state_dict().items()}
    whole = fine_tune(transformer, calls, TRAINING, tmp_path / "whole")
    expected = {name: value.clone() for name, value in transformer.state_dict().items()}

    transformer.load_state_dict(start)
    halted = fine_tune(transformer, calls, replace(TRAINING, minutes=0.0), tmp_path / "parts")
    assert halted["steps"] == 2 < whole["steps"] == 4
    transformer.load_state_dict(start)
    assert fine_tune(transformer, calls, TRAINING, tmp_path / "parts")["steps"] == 4
    for name, value in transformer.state_dict().items():
        assert torch.equal(value, expected[name]), name

    with pytest.raises(ValueError, match="give the same settings or another folder"):
        fine_tune(transformer, calls, replace(TRAINING, rate=1.0), tmp_path / "parts")


@pytest.mark.parametrize("train", ["all", "lora", "projections"])
def test_the_script_fine_tunes_a_pipeline_folder(tmp_path, monkeypatch, train):
    """A folder and a file of prompts give a transformer, or a LoRA of it, and its projections."""
    tiny_pipeline("wan").save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a fox\n\na red fox\n")
    call = {"height": 64, "width": 48, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}
    command = ["finetune_sla.py", "--output", tmp_path / "tuned", "--model", tmp_path / "model"]
    command += ["--prompts", tmp_path / "prompts.txt", "--call", json.dumps(call), "--steps", 2, "--batch", 2]
    command += ["--train", train, "--rank", 2]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    finetune_sla.main()
    assert (tmp_path / "tuned" / "sla.safetensors").is_file()
    whole = (tmp_path / "tuned" / "transformer" / "config.json").is_file()
    lora = (tmp_path / "tuned" / "pytorch_lora_weights.safetensors").is_file()
    assert (whole, lora) == (train != "lora", train == "lora")
    assert json.loads((tmp_path / "tuned" / "training.json").read_text())["steps"] == 2


@pytest.mark.parametrize("name", ["demo-wan", "demo-flux"])
def test_variants_train_and_are_judged(name, tmp_path):
    """SLA without projections is sparse attention; after training both have figures, and the table shows them."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]
    family, (prompts, _) = subject.family, subject.draw(1, seed=0)
    tokenizers = family.make_tokenizers(prompts[0].split())
    flow = family.make_flow(tokenizers, small=True)
    for weight in flow.transformer.parameters():
        torch.nn.init.normal_(weight, std=0.1)  # some start at zero
    vae = family.make_vae(small=True)
    call, is_clip = {"max_sequence_length": 64}, isinstance(subject, Clips)
    if is_clip:
        family.set_statistics(vae, torch.zeros(16), torch.ones(16))
        call = {**family.call, "num_frames": 5}
    else:
        vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    write_folder(family.assemble(vae, flow, tokenizers), tmp_path / "model", "", {**call, "words": ["a"]})
    found = list(rows(subject, tmp_path / "model", SMOKE, torch.device("cpu"), tmp_path))
    dense, sparse, sla = found
    assert dense["before"]["psnr_db"] is None and dense["before"]["velocity_mse"] < 1e-8
    assert (sparse["variant"], sla["variant"]) == SMOKE.variants
    assert (sla["after"]["flow_loss"] is not None) == is_clip
    for key in ("psnr_db", "velocity_mse", "flow_loss")[: 3 if is_clip else 2]:
        assert sparse["before"][key] == sla["before"][key] and sparse["after"][key] != sla["after"][key]
    assert sla["before"]["velocity_mse"] > 1e-6
    lines = table(found).splitlines()
    assert len(lines) == 2 + len(found) and lines[2].startswith("| dense | 100% |  | ∞ |")


def test_variants_differ_in_one_part_each():
    for name, variant in VARIANTS.items():
        transformer = tiny_pipeline("wan").transformer
        variant.swap_in(transformer)
        for attention in swapped_attention(transformer).values():
            matrix = attention.projection.weight
            assert matrix.requires_grad == name.startswith("sla")
            expected = torch.eye(len(matrix)) if variant.projection == "identity" else torch.zeros_like(matrix)
            assert torch.equal(matrix.detach(), expected) and attention.settings.critical == variant.critical
