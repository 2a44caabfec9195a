"""``dit-accel env``: versions, devices and kernel backends, for bug reports."""

import json
import platform
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from dit_accel.errors import BackendError, headline
from dit_accel.tools.extras import EXTRAS

PACKAGES = ("torch", "diffusers", "transformers", "triton", *EXTRAS)
CALL = {"prompt": "two pink stars over the sea at sunset", "height": 256, "width": 256, "num_inference_steps": 8}
CHECKED = {  # presets, and changes of them
    "exact": {},
    "balanced": {},
    "exact, tiles skipped": {"skip": {"policy": "sparge", "steps": "all", "tau_kv": 0.06}},
}


def command(
    check: Annotated[bool, typer.Option("--check", help="Also make images with a demo model on each device.")] = False,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Also time the Triton kernels at other sizes on this GPU, and keep faster ones."),
    ] = False,
    minutes: Annotated[float, typer.Option("--minutes", min=0, help="Time limit of --tune.")] = 10,
) -> None:
    """Print versions, devices, and which kernel backends work here."""
    import torch

    import dit_accel
    from dit_accel.kernels.backends import backend_status
    from dit_accel.tools.measure.origin import version_of

    rows = {"dit-accel": dit_accel.__version__, "python": f"{platform.python_version()} on {platform.platform()}"}
    rows |= {package: version_of(package) or "not installed" for package in PACKAGES}
    rows["CUDA"] = torch.version.cuda or "not in this build of torch"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        rows[f"cuda:{index}"] = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB"
    statuses = backend_status()
    rows |= {f"kernels: {backend}": status for backend, status in statuses.items()}
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}  {value}")
    for line in _check() if check else ():
        typer.echo(line)
    if tune:
        lack = "torch finds no GPU" if statuses["triton"] == "ok" else statuses["triton"]
        if statuses["triton"] != "ok" or not torch.cuda.is_available():
            raise BackendError(f"--tune needs a CUDA GPU and Triton: {lack}")
        tune_sizes(torch.device("cuda", torch.cuda.current_device()), minutes)


def tune_sizes(device: Any, minutes: float, clock: Callable[[], float] = time.monotonic, **timer: Any) -> None:
    """Measure kernels until the minutes are over or the user interrupts; write and print the faster sizes."""
    from dit_accel.kernels._triton import configs
    from dit_accel.tools.files import write_whole
    from dit_accel.tools.measure.sizes import FASTER, SizedKernel, names

    end, stored, file = clock() + 60 * minutes, configs.own_sizes(device), configs.sizes_file(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    for name in names(device):
        kept = stored.get(name)
        try:
            if clock() > end:
                raise KeyboardInterrupt
            sizes, ratio = SizedKernel(name, device, **timer).climb(lambda: clock() > end)
            kept = sizes if ratio < FASTER else None
            typer.echo(f"{name}: {1 / ratio:.2f}x with {sizes}" if kept else f"{name}: as shipped")
        except KeyboardInterrupt:
            typer.echo(f"stopped at {name}")
            break
        except Exception as error:  # of an op that this GPU lacks
            typer.echo(f"{name}: left out, {headline(error)}")
        finally:
            configs.launch_with(device, name, kept)
            write_whole(file, json.dumps(stored, indent=1))
    typer.echo(f"Launches take these sizes from now on; please send them in an issue. They are in {file}")
    for name, sizes in stored.items():
        column = "tma" if name.endswith(configs.BY_TMA) else configs.architecture(device)
        typer.echo(f'    "{name.removesuffix(configs.BY_TMA)}": {json.dumps({column: sizes})},')


def _check() -> Iterator[str]:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    cases = [("cpu", torch.float32)]
    if accelerator is not None:
        cases += [(accelerator.type, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for device, dtype in cases:
        what = f"{device}, {str(dtype).removeprefix('torch.')}"
        try:
            yield from (f"{what}: {line}" for line in _images(device, dtype))
        except Exception as error:  # of a device that was never tried; the others may run
            yield f"{what}: {headline(error)}"


def _images(device: str, dtype: Any) -> Iterator[str]:
    from diffusers import DiffusionPipeline

    from dit_accel import accelerated
    from dit_accel.tools.demo import DEFAULT_MODEL, demo_path
    from dit_accel.tools.measure.metrics import psnr
    from dit_accel.tools.measure.timing import timed_output

    pipe = DiffusionPipeline.from_pretrained(demo_path(DEFAULT_MODEL), dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)

    def call() -> Any:
        timed_output(pipe, CALL | {"num_inference_steps": 1}, seed=0)  # kernels are compiled here
        return timed_output(pipe, CALL, seed=0)

    plain = call()
    yield f"plain {plain.seconds:.2f} s"
    for name, changes in CHECKED.items():
        with accelerated(pipe, name.partition(",")[0], **changes):
            output, report = call(), pipe.dit_accel.report()
        like = psnr(output.results[0], plain.results[0])
        yield f"{name} {output.seconds:.2f} s, PSNR {like:.1f} dB, computed {report.computed_fraction:.2f}"
        yield from (f"{name}: {note}" for note in (*report.notes, *report.fallbacks))
