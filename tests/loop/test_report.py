"""The report: counts, plain values, and its text."""

import json

from dit_accel.loop.report import AttentionRecord, PromptRecord, RunReport, StepRecord


def report() -> RunReport:
    return RunReport(
        preset="balanced",
        family="flux",
        layers=["transformer_blocks.0"],
        steps=[
            StepRecord(0, 1000.0, "full", seconds=1.0),
            StepRecord(1, 750.0, "update", error=0.25, seconds=1.0),
            StepRecord(2, 500.0, "dispatch"),
            StepRecord(3, 250.0, "update", error=0.125, seconds=1.0),
        ],
        density=[[1.0, 1.0, 0.0, 1.0]],
        computed_fraction=0.75,
        attentions=[
            AttentionRecord("transformer_blocks.0", 1, 0.5, 0.0625),
            AttentionRecord("transformer_blocks.0", 3, 0.25, 0.1875),
            AttentionRecord("transformer_blocks.1", 3, 0.75),
        ],
        fallbacks=[{"site": f"block.{i}", "reason": "LoRA"} for i in range(5)] + [{"site": "last", "reason": "hooked"}],
        seconds=3.0,
        prompts=[
            PromptRecord(["full", "update", "dispatch", "update"], [None, 0.25, None, 0.125]),
            PromptRecord(["full", "update", "dispatch", "dispatch"], [None, 0.125, None, None], 0.5),
        ],
        parts={"text_encoder": 0.25, "transformer": 3.0, "vae.decoder": 0.5, "rest": 0.125},
        cache_bytes=3 * 2**19,
        host_bytes=2**19,
        estimated_bytes=2**21,
        memory_measures=["attention history in host memory"],
        notes=["shapes changed at step 2: caches dropped"],
    )


def test_remarks_and_fallbacks_are_logged(caplog):
    """Under the package's name, each once."""
    caplog.set_level("INFO", logger="dit_accel")
    told = report()
    for _ in range(2):
        told.note("caches dropped")
        told.fall_back("block.9", "it is compiled")
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["caches dropped", "block.9 falls back to dense: it is compiled"]
    told.fall_back("block.9", "LoRA")
    assert told.fallbacks[6:] == [{"site": "block.9", "reason": reason} for reason in ("it is compiled", "LoRA")]


def test_json_holds_every_field():
    """The report survives a round trip through JSON, its counts included."""
    values = json.loads(json.dumps(report().to_json()))
    assert values.pop("steps_by_mode") == {"full": 1, "update": 2, "dispatch": 1}
    steps = [StepRecord(**step) for step in values.pop("steps")]
    attentions = [AttentionRecord(**each) for each in values.pop("attentions")]
    prompts = [PromptRecord(**prompt) for prompt in values.pop("prompts")]
    assert RunReport(**values, steps=steps, attentions=attentions, prompts=prompts) == report()


def test_a_prompt_has_a_report_of_its_own():
    """Modes, errors and computed fraction of each prompt; for a shared decision all prompts have the same report."""
    own = report().of_prompt(1)
    assert own.steps_by_mode == {"full": 1, "update": 1, "dispatch": 2} and own.computed_fraction == 0.5
    assert [step.error for step in own.steps] == [None, 0.125, None, None] and own.of_prompt(1) is own


def test_text_states_what_ran():
    """Steps, fraction, time, memory, errors and notes are readable; long lists of fallbacks are cut by reason."""
    lines = [" ".join(line.split()) for line in str(report()).splitlines()]
    assert lines == [
        "dit-accel balanced on flux",
        "steps 4 (3 computed, 1 forecast)",
        "computed fraction 0.750 of the blocks' FLOPs",
        "transformer time 3.00 s (3 computed steps 3.00 s, 1 forecast 0.00 s)",
        "whole call 3.88 s: text_encoder 0.25 s, transformer 3.00 s, vae.decoder 0.50 s, rest 0.12 s",
        "cache memory 1.5 MiB, 2.0 MiB expected, and 0.5 MiB of the host's",
        "to save memory attention history in host memory",
        "forecast error 0.1250 at the last step measured, 0.2500 at most",
        "tiles left out 50% on computed steps after the warm-up",
        "attention error 0.1250 on the probe's rows, 0.1875 at most (transformer_blocks.0, step 3)",
        "note shapes changed at step 2: caches dropped",
        "dense fallback block.0, block.1, block.2 and 2 more: LoRA",
        "dense fallback last: hooked",
    ]


def test_text_of_a_run_without_steps():
    """A report before the first call says so, and has no figures."""
    report = RunReport("exact", "any", [])
    assert str(report).splitlines() == ["dit-accel exact on any", "  no accelerated call yet"]
    assert report.left_out == 0.0 and report.computed_fraction is None and report.steps_by_mode == {}
