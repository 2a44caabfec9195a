"""``dit-accel compare``: presets beside what else could make one's own model faster, in quality and time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dit_accel.cli import options
from dit_accel.cli.failures import explained_failures
from dit_accel.cli.loading import Loading, load_pipeline
from dit_accel.cli.loras import parse_loras
from dit_accel.cli.outputs import ForceOption, require_writable
from dit_accel.cli.pipelines import call_arguments, read_image
from dit_accel.cli.progress import progress_bar
from dit_accel.tools.demo import model_preset, tuning_prompts
from dit_accel.tools.extras import require_extra

if TYPE_CHECKING:
    from rich.console import Console

    from dit_accel.tools.compare import Bench, Method, Sweep

LEVELS = ("quality", "balanced", "turbo")


def command(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="What pictures show; this or --prompts.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="File with one prompt a line; figures are means over them.")
    ] = None,
    model: options.ModelOption = options.DEFAULT_MODEL,
    presets: Annotated[
        str | None,
        typer.Option(
            "--presets",
            help="Presets to compare: names or paths, separated by commas.",
            show_default="quality, balanced and turbo, and other targets of balanced",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            help="Other methods to compare with: `all`, `none`, or names, separated by commas; docs/guide/comparing.md "
            "lists them.",
        ),
    ] = "all",
    settings: Annotated[
        int,
        typer.Option(
            "--settings",
            min=1,
            help="Most settings of each other method, and targets of the closed loop, spread over their range.",
        ),
    ] = 4,
    call: options.CallOption = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Stem of NAME.json, from which an interrupted comparison goes on, NAME.md and two plots.",
        ),
    ] = Path("comparison"),
    steps: options.StepsOption = None,
    seed: options.SeedOption = 0,
    height: options.HeightOption = None,
    width: options.WidthOption = None,
    num_frames: options.FramesOption = None,
    image: options.ImageOption = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = None,
    lora: options.LoraOption = None,
    quantize: options.QuantizeOption = None,
    repeats: options.RepeatsOption = options.REPEATS,
    force: ForceOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Compare presets with other ways to make a pipeline faster: same pipeline, prompts and seeds.

    dit-accel compare --prompt "a red star over the sea"

    dit-accel compare --model black-forest-labs/FLUX.1-dev --prompts mine.txt --peers first-block-cache,dbcache
    """
    from rich.console import Console

    from dit_accel.tools.compare import Bench, Prompt, Sweep
    from dit_accel.tools.origin import describe_run

    console = Console(quiet=quiet)
    if (prompt is None) == (prompts is None):
        both = "was given beside --prompts; give one of the two" if prompts else "needs a text, or --prompts a file"
        raise options.OptionError("--prompt", both)
    _require_output(output, force)
    require_extra("matplotlib", "dit-accel compare, which plots what it measures,")
    named_peers = _peers(peers)
    if presets is not None and not _names(presets):
        raise options.OptionError("--presets", "names none; give names or paths, separated by commas, or leave it out")
    for name in _names(presets):
        options.choose_preset(name, {})  # a misspelt preset should not wait for the model to load
    texts = [prompt] if prompts is None else options.read_prompts(prompts)
    given = {"steps": steps, "height": height, "width": width, "num-frames": num_frames}
    loading = Loading(device, dtype, "none", parse_loras(lora), quantize)
    picture, others = read_image(image), options.parse_call(call)

    def load(console: Console) -> Any:
        return load_pipeline(model, loading, console)

    pipe = load(console)
    loaded = [pipe]
    arguments = call_arguments(pipe, model, {**given, "image": picture}, others)
    facts = {**given, "image": image and str(image), "dtype": str(pipe.dtype), "model": model, "seed": seed}
    facts |= ({"call": others} if others else {}) | loading.facts
    sweep = Sweep(output, {**facts, "prompts": texts})
    with progress_bar(console, "plain", "settings") as progress, explained_failures(type(pipe)):
        bench = Bench(
            lambda: progress.watch(loaded.pop() if loaded else load(Console(quiet=True))),
            arguments,
            [Prompt(text, seed + index) for index, text in enumerate(texts)],
            Prompt(next(text for text in tuning_prompts(model) if text not in texts), seed),
            progress.begin,
            repeats,
        )
        del pipe  # the bench drops it before it loads another
        methods, left_out = _methods(bench, _names(presets), model, named_peers, settings)
        sweep.describe(bench, describe_run(bench.pipe.device), left_out)
        missing = sweep.missing(methods)
        for left, method in zip(range(len(missing), 0, -1), missing, strict=True):
            progress.expect(len(methods), len(methods) - left)
            sweep.add(bench.measure(method))
    written = sweep.publish()
    _print_summary(console, sweep)
    console.out(f"wrote {', '.join(map(str, written))}", highlight=False)


def _require_output(stem: Path, force: bool) -> None:
    """Checks that the files of a comparison can be written; one that goes on replaces its own."""
    if not stem.name:
        raise options.OptionError("--output", f"{stem} is a folder; give the stem of files in it")
    document, *others = (stem.with_name(f"{stem.name}{end}") for end in (".json", ".md", ".png", "-time.png"))
    goes_on = os.path.isfile(document)
    for path in (document, *others):
        require_writable(path, "--output", force=force or goes_on)


def _names(listed: str | None) -> list[str]:
    return [name.strip() for name in (listed or "").split(",") if name.strip()]


def _peers(listed: str) -> list[str] | None:
    """Names of peers; None = all."""
    from dit_accel.tools.compare import PEERS

    if listed in ("all", "none"):
        return None if listed == "all" else []
    unknown = [name for name in _names(listed) if name not in PEERS]
    if unknown:
        raise options.OptionError("--peers", f"{unknown[0]!r} is no peer; there are {', '.join(PEERS)}")
    return _names(listed)


def _methods(
    bench: Bench, presets: list[str], model: str, peers: list[str] | None, settings: int
) -> tuple[list[Method], dict[str, str]]:
    """What is compared, and why some peers are left out."""
    from dit_accel.tools.compare import our_methods, peer_methods, spread

    targets: list[Method] = []
    if not presets:
        base = options.choose_preset(model_preset(model), {}, bench.pipe).name
        presets = [f"{base.removesuffix('balanced')}{level}" for level in LEVELS]
        targets = spread(our_methods(bench.pipe, [], base), settings)
    others, left_out = peer_methods(bench.pipe, bench.subject.steps, peers, settings)
    return [*our_methods(bench.pipe, presets), *targets, *others], left_out


def _print_summary(console: Console, sweep: Sweep) -> None:
    from rich.table import Table

    from dit_accel.tools.compare.report import remarks, settings_table

    head, lines = settings_table(sweep.document)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, title in enumerate(head):
        table.add_column(title, justify="left" if place < 2 else "right")
    for cells in lines:
        table.add_row(*cells)
    console.print(table)
    for remark in remarks(sweep.document):
        console.out(f"note: {remark}", highlight=False)
