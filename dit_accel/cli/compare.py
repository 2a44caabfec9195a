"""``dit-accel compare``: presets compared with other acceleration methods on one model, in quality and time."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dit_accel.cli.options import RunOptions, option, parse_call, repeats_option, takes_options
from dit_accel.cli.progress import progress_bar
from dit_accel.errors import ArgumentError
from dit_accel.serving.failures import explained_failures
from dit_accel.serving.input_images import read_image
from dit_accel.serving.loading import load_pipeline
from dit_accel.serving.outputs import require_writable
from dit_accel.serving.pipelines import call_arguments
from dit_accel.serving.prompts import read_prompts
from dit_accel.tools.demo import model_preset, tuning_prompts
from dit_accel.tools.extras import require_extra
from dit_accel.tools.measure.repeats import PLAIN_STEPS

if TYPE_CHECKING:
    from dit_accel.tools.measure.compare import Bench, Method, Sweep

FIRST = ("setting", "computed", "speed-up", "PSNR dB", "worst dB")  # columns that a narrow terminal shows


@dataclass(frozen=True, kw_only=True)
class CompareOptions(RunOptions):
    prompt: str | None = option("Text prompt; this or --prompts.", "--prompt", "-p")
    prompts: Path | None = option("File with one prompt per line; results are means over the prompts.", "--prompts")
    presets: str | None = option(
        "Presets to compare: names or paths, separated by commas.",
        show_default="quality, balanced and turbo, and other targets of balanced",
    )
    peers: str = option(
        "Other methods to compare with: `all`, `none`, or names, separated by commas. docs/notes/comparisons.md "
        "lists the names.",
        default="all",
    )
    settings: int = option(
        "Maximum number of settings of each other method, and of our target errors, spread over their range.",
        default=4,
        min=1,
    )
    output: Path = option(
        "Stem of the output files: NAME.json, NAME.md and two plots. An interrupted comparison resumes from NAME.json.",
        "--output",
        "-o",
        default=Path("comparison"),
    )
    images: bool = option(
        "Also write the images to the folder NAME-images, and a contact sheet of our presets to NAME-sheet.png; of a "
        "video the frame in its middle.",
        default=False,
    )
    repeats: int = repeats_option()


@takes_options(without=("preset", "overrides"))
def command(options: CompareOptions) -> None:
    """Compare presets with other acceleration methods on the same pipeline, prompts and seeds.

    dit-accel compare --prompt "a red star over the sea"

    dit-accel compare --model black-forest-labs/FLUX.1-dev --prompts mine.txt --peers first-block-cache,dbcache
    """
    if (options.prompt is None) == (options.prompts is None):
        raise ArgumentError("prompt", "or --prompts must be given, and not both")
    compare(options, read_prompts(options.prompts) if options.prompt is None else [options.prompt])


def compare(options: CompareOptions, texts: list[str], minutes: float = math.inf) -> None:
    """Run a comparison on these prompts, or on as many as fit into the time; methods that don't fit are left out."""
    from dit_accel.tools.measure.compare import Bench, Prompt, Sheet, Sweep
    from dit_accel.tools.measure.kit import prompts_within
    from dit_accel.tools.measure.origin import describe_run

    end, slowest = time.monotonic() + 60 * minutes, 0.0
    console = Console(quiet=options.quiet)
    named_peers, presets = _peers(options.peers), _presets(options.presets)
    _require_output(options.output, options.force)
    require_extra("matplotlib", "dit-accel compare, which plots its results,")
    loading, picture, others = options.loading(), read_image(options.image), parse_call(options.call)

    plain_steps = PLAIN_STEPS if options.offload == "none" else None  # a call's start uploads weights too
    load = partial(load_pipeline, options.model, loading)
    pipe = load(console)
    loaded = [pipe]
    arguments = call_arguments(pipe, options.model, {**options.sizes, "image": picture}, others)
    facts = {"model": options.model, "dtype": str(pipe.dtype), "image": options.image and str(options.image)}
    facts |= {**options.sizes, "seed": options.seed} | ({"call": others} if others else {}) | loading.facts
    facts |= {"offload": options.offload} if options.offload != "none" else {}
    if minutes < math.inf:
        texts = prompts_within(minutes, pipe, arguments, texts, options.output, plain_steps)
    sweep = Sweep(options.output, {**facts, "prompts": texts})
    sheet = Sheet(options.output, len(texts)) if options.images else None
    with progress_bar(console, "plain", "settings") as progress, explained_failures(type(pipe)):
        bench = Bench(
            lambda: progress.watch(loaded.pop() if loaded else load(Console(quiet=True))),
            arguments,
            [Prompt(text, options.seed + index) for index, text in enumerate(texts)],
            Prompt(next(text for text in tuning_prompts(options.model) if text not in texts), options.seed),
            progress.begin,
            options.repeats,
            plain_steps,
            *([] if sheet is None else [sheet.add]),
        )
        if sheet is not None and not bench.makes_images:
            raise ArgumentError("images", f"{type(pipe).__name__} makes sound alone; leave the option out")
        del pipe  # so that the bench can free it before it loads another
        methods, left_out = _methods(bench, presets, options.model, named_peers, options.settings)
        sweep.describe(bench, describe_run(bench.device), left_out)
        missing = sweep.missing(methods)
        for left, method in zip(range(len(missing), 0, -1), missing, strict=True):
            progress.expect(len(methods), len(methods) - left)
            started = time.monotonic()
            if started + slowest > end and not method.ours:
                left_out[method.name] = f"{minutes:g} minutes were over; run again to go on"
                continue
            sweep.add(bench.measure(method))
            slowest = max(slowest, time.monotonic() - started)
    written = sweep.publish()
    if sheet is not None:
        written.append(sheet.write(sweep.rows))
    _print_summary(console, sweep)
    console.out(f"wrote {', '.join(map(str, written))}", highlight=False)


def _require_output(stem: Path, force: bool) -> None:
    if not stem.name:
        raise ArgumentError("output", f"{stem} is a folder; give the stem of files in it")
    ends = (".json", ".md", ".png", "-time.png", "-sheet.png")
    document, *others = (stem.with_name(f"{stem.name}{end}") for end in ends)
    goes_on = os.path.isfile(document)
    for path in (document, *others):
        require_writable(path, "output", force=force or goes_on)


def _presets(listed: str | None) -> list[str]:
    from dit_accel.models.presets import load_preset

    presets = _names(listed)
    if listed is not None and not presets:
        raise ArgumentError("presets", "is empty; give names or paths, separated by commas, or leave it out")
    for name in presets:
        load_preset(name)
    return presets


def _names(listed: str | None) -> list[str]:
    return [name.strip() for name in (listed or "").split(",") if name.strip()]


def _peers(listed: str) -> list[str] | None:
    from dit_accel.tools.measure.compare import PEERS

    if listed in ("all", "none"):
        return None if listed == "all" else []
    if unknown := [name for name in _names(listed) if name not in PEERS]:
        raise ArgumentError("peers", f"{unknown[0]!r} is unknown; methods are {', '.join(PEERS)}")
    return _names(listed)


def _methods(
    bench: Bench, presets: list[str], model: str, peers: list[str] | None, settings: int
) -> tuple[list[Method], dict[str, str]]:
    from dit_accel.pipeline import preset_for
    from dit_accel.presets.loading import LEVELS
    from dit_accel.tools.measure.compare import our_methods, peer_methods, spread

    targets: list[Method] = []
    if not presets:
        base = preset_for(bench.pipe, model_preset(model)).name
        presets = [f"{base.removesuffix('balanced')}{level}" for level in LEVELS]
        targets = spread(our_methods(bench.pipe, [], base), settings) if settings > 1 else []
    others, left_out = peer_methods(bench.pipe, bench.subject.steps, peers, settings)
    return [*our_methods(bench.pipe, presets), *targets, *others], left_out


def _print_summary(console: Console, sweep: Sweep) -> None:
    from rich.table import Table

    from dit_accel.tools.measure.compare.report import remarks, settings_table

    head, lines = settings_table(sweep.document)
    rows = [dict(zip(head, cells, strict=True)) for cells in lines]
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in head} if rows else {}
    shown: list[str] = []
    for title in sorted(widths, key=lambda title: (title not in FIRST, head.index(title))):
        if sum(widths[name] + 2 for name in (*shown, title)) - 2 <= console.width:
            shown.append(title)  # other columns are in the files
    shown.sort(key=head.index)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in shown:
        table.add_column(title, justify="left" if title in ("series", "setting") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in shown))
    console.print(table)
    for remark in remarks(sweep.document):
        console.out(f"note: {remark}", highlight=False)
