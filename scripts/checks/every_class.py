#!/usr/bin/env python3
"""Run a small model of every denoiser class of diffusers plainly and accelerated, and compare the outputs.

Each class runs in a pipeline, or else alone in a denoising loop: plainly, with `exact`, with `balanced` and with every
second step forecast, for one sample and a batch of two, with guidance where the pipeline has it. Pipelines are from
`tests/tiny`, `tests/models/tiny` and diffusers' own tests, of which it needs a checkout. The modular pipelines of a
class (`class_study/blocks.py`) run too.

    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers
    pip install parameterized requests_mock                        # which diffusers' tests import
    python -m scripts.checks.every_class diffusers --output docs/results/every-class
    python -m scripts.checks.every_class diffusers --output docs/results/every-class --only Krea2Transformer2DModel
    python -m tests.models.test_transformer_table          # then writes the page of the table

Writes STEM.json. With --only, the other classes in the file stay, and `run again` gets the commit of these. Exits with
1 if a run crashed or a result is wrong.
"""

import argparse
import inspect
import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import diffusers.models.transformers
import torch

from dit_accel import load_preset
from dit_accel.errors import DitAccelError, UnsupportedError, shortened
from dit_accel.models.transformer import TransformerDriver
from dit_accel.tools.measure.origin import commit_of, describe_run
from scripts.checks import stand_ins
from scripts.checks.class_study import cases, modular
from scripts.checks.class_study.blocks import MODULAR
from scripts.checks.class_study.cases import Case, NotRun
from tests.models import tiny
from tests.tiny import tiny_output, tiny_pipeline

BOUND = 0.5  # relative error of an output; an output of noise errs by 1.4
WRONG = ("crash", "differs")
TINY = (
    *("flux", "sd3", "mochi", "ltx", "qwen-image", "wan", "hunyuan", "framepack", "hunyuan15"),
    *tiny.PIPELINES,
    *tiny.others.OTHERS,
)


class TooSlow(BaseException):
    """A class took longer than its limit; not an `Exception`, which would count as a crash of its model."""


def classes() -> dict[str, type[torch.nn.Module]]:
    """Return every transformer class of the installed diffusers by name."""
    named = inspect.getmembers(diffusers.models.transformers, inspect.isclass)
    return {name: cls for name, cls in named if issubclass(cls, torch.nn.Module)}


def study(case: Case) -> dict[str, Any]:
    """Run a case, and return what became of each kind for one sample and for two; raises if it fails plainly."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hooks = [item.register_forward_hook(count) for item in case.transformers]
    plain = {1: _seeded(case, 1)}
    for hook in hooks:
        hook.remove()
    found: dict[str, Any] = {"ran": case.title, "calls": calls, "outputs": len(plain[1])}
    if not all(item.isfinite().all() for item in plain[1]):
        raise NotRun(f"{case.title}: the plain outputs are not finite")
    try:
        two = _seeded(case, 2)
        if sum(item.numel() for item in two) <= sum(item.numel() for item in plain[1]):
            raise NotRun("a batch of two has no more outputs")
        plain[2] = two
    except Exception as error:
        found["batch"] = _reason(error)
    for kind in cases.PRESETS:
        found[kind] = [_compared(case, kind, batch, output) for batch, output in plain.items()]
    return found


def _seeded(case: Case, batch: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.run(batch)


def _compared(case: Case, kind: str, batch: int, plain: list[torch.Tensor]) -> dict[str, Any]:
    """Return how an accelerated run compares with the plain one."""
    try:
        report, restore = case.accelerate(kind)
    except DitAccelError as error:
        return {"is": "refused", "reason": shortened(str(error))}
    try:
        output = _seeded(case, batch)
        with warnings.catch_warnings(action="ignore"):
            result = report()
    except DitAccelError as error:
        return {"is": "refused", "reason": shortened(str(error))}
    except Exception as error:
        return {"is": "crash", "reason": _reason(error)}
    finally:
        restore()
    forecasts = result.steps_by_mode.get("dispatch", 0)
    verdict = {"forecasts": forecasts, **_verdict(plain, output)}
    if kind == "exact" and verdict["is"] != "equal":
        verdict["is"] = "differs"
    if kind == "forecast" and verdict["is"] == "equal" and not forecasts:
        verdict |= {"is": "plain", "reason": result.notes[-1] if result.notes else "no step was forecast"}
    return verdict


def _verdict(plain: list[torch.Tensor], output: list[torch.Tensor]) -> dict[str, Any]:
    if [item.shape for item in plain] != [item.shape for item in output]:
        return {"is": "differs", "reason": "its outputs have other shapes"}
    if not all(item.isfinite().all() for item in output):
        return {"is": "differs", "reason": "its outputs are not finite"}
    if all(map(torch.equal, plain, output)):
        return {"is": "equal"}
    error = max(float((one - other).norm() / one.norm()) for one, other in zip(plain, output, strict=True))
    return {"is": "within the bound" if error <= BOUND else "beyond the bound", "error": round(error, 4)}


def _reason(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return line if isinstance(error, NotRun) else shortened(f"{type(error).__name__}: {line}")


def tiny_case(name: str) -> Case:
    """A case of a tiny pipeline, built anew, because pipelines of tests keep their weights."""
    if name in tiny.TINY_PIPELINES:
        pipe = tiny_pipeline(name)
        changes = {1: {}, 2: {"prompt": cases.PROMPTS}}
        return cases.of_pipeline(pipe, lambda batch: tiny_output(pipe, name, steps=cases.STEPS, **changes[batch]))
    pipe, arguments = tiny.built.__wrapped__(name)
    for transformer in filter(cases.is_denoiser, pipe.components.values()):
        cases.redrawn(transformer)
    named = inspect.signature(pipe.__call__).parameters
    call = partial(tiny.outputs, pipe, arguments, num_inference_steps=cases.STEPS)
    return cases.of_pipeline(pipe, cases.first_that_runs(call, partial(cases.batches, arguments, named)))


def row(name: str, checkout: Path | None) -> dict[str, Any]:
    """Return the findings on a class: in our pipelines, else in diffusers' or alone, and in modular pipelines."""
    parts = {item: tiny.pipeline(item).components.values() for item in TINY}
    known = [item for item in TINY if any(type(part).__name__ == name for part in parts[item])]
    wanted = [iter([partial(tiny_case, item)]) for item in known] or [makers(name, checkout)]
    blocks = modular.makers(name, cases.small_transformer(checkout, name)) if name in MODULAR else ()
    failed: list[str] = []
    found = [item for item in (_first(name, some, failed) for some in wanted) if item is not None]
    in_blocks = [item for item in (_first(name, iter([make]), failed) for make in blocks) if item is not None]
    more: dict[str, Any] = {"failed": list(dict.fromkeys(failed))} if failed else {}
    if in_blocks:
        more = {"modular": in_blocks} | more
    if found:
        return {"runs": found} | more
    reason = why_refused(classes()[name])
    return ({"not run": "no small model of it is known"} if reason is None else {"refused": reason}) | more


def _first(name: str, makers: Iterator[Callable[[], Case]], failed: list[str]) -> dict[str, Any] | None:
    """Return the findings of the first maker whose plain run works, or None; add errors of the others to ``failed``."""
    for make in makers:
        try:
            case = make()
            if any(type(item).__name__ == name for item in case.transformers):
                return study(case)
        except Exception as error:
            failed.append(_reason(error))
    return None


def why_refused(kind: type[torch.nn.Module]) -> str | None:
    """Return why no instance of a class can be accelerated, or None."""
    try:
        TransformerDriver(kind.__new__(kind), load_preset("balanced"), "transformer", lambda: None)
    except UnsupportedError as error:
        return str(error)
    return None


def makers(name: str, checkout: Path | None) -> Iterator[Callable[[], Case]]:
    """Yield makers of cases of a class without a tiny pipeline of ours, the best first."""
    if checkout is not None:
        for source in (cases.pipelines, cases.alone_of_tests):
            yield from source(checkout, name)
    yield from cases.alone_of_small(name)


def is_wrong(found: dict[str, Any]) -> bool:
    runs = [*found.get("runs", []), *found.get("modular", [])]
    return any(item["is"] in WRONG for run in runs for kind in cases.PRESETS for item in run[kind])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of diffusers")
    parser.add_argument("--output", type=Path, required=True, help="stem of the JSON file")
    parser.add_argument("--only", nargs="+", help="names of classes; all by default")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of one class")
    options = parser.parse_args(arguments)
    if not (options.checkout / "tests" / "pipelines").is_dir():
        parser.error(f"checkout must hold tests/pipelines, as one of diffusers does; {options.checkout} does not")
    unknown = sorted(set(options.only or ()) - set(classes()))
    if unknown:
        parser.error(f"--only names {', '.join(unknown)}, and diffusers has {', '.join(classes())}")
    written, checkout = options.output.with_suffix(".json").resolve(), options.checkout.resolve()
    run = describe_run("cpu") | {"commit of diffusers' tests": commit_of(checkout)}
    document = {"run": run, "run again": {}, "bound": BOUND, "classes": {}}
    if options.only and written.exists():
        document |= json.loads(written.read_text())
    rows = document["classes"]
    signal.signal(signal.SIGALRM, _give_up)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        stand_ins.write(Path(folder))
        cases.link(checkout, Path(folder))
        os.chdir(folder)
        for name in options.only or classes():
            signal.alarm(options.seconds)
            try:
                rows[name] = row(name, checkout)
            except TooSlow:
                rows[name] = {"not run": f"it took longer than {options.seconds} s"}
            signal.alarm(0)
            print(name, json.dumps(rows[name]), flush=True)
            if document["run"] is not run:
                document["run again"][name] = run["commit"]
            written.write_text(json.dumps(document | {"classes": dict(sorted(rows.items()))}, indent=1) + "\n")
        os.chdir("/")
    wrong = [name for name, found in rows.items() if is_wrong(found)]
    ran = sum(len(found.get(kind, [])) for found in rows.values() for kind in ("runs", "modular"))
    print(f"{ran} runs; {len(wrong)} classes crash or are wrong: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


def _give_up(*_: Any) -> None:
    raise TooSlow


if __name__ == "__main__":
    main()
