"""``dit-accel serve``: an HTTP server with OpenAI's interface for images and videos."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from dit_accel.cli import options as shared
from dit_accel.cli.options import RunOptions, named_loras, option, parse_call, require_engine, takes_options
from dit_accel.errors import ArgumentError, shortened, shown
from dit_accel.serving.loading import resolve_model
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.prompts import read_prompts
from dit_accel.serving.ray_cluster import RayActor, joined_cluster
from dit_accel.serving.remote_worker import LocalProcess, RemoteWorker
from dit_accel.tools.extras import require_extra

SHORTEST_KEY = 16  # characters


@dataclass(frozen=True, kw_only=True)
class ServeOptions(RunOptions):
    models: list[str] | None = option(
        "Folder of a diffusers pipeline, id on the Hub, or demo model; NAME is for clients. Repeatable: requests "
        "choose by `model`, and all but the first load at their first request.",
        "--model",
        "-m",
        metavar="[NAME=]MODEL",
        show_default=shared.DEFAULT_MODEL,
    )
    max_models: int = option("Most models that stay loaded on a GPU.", default=1, min=1, max=100)
    host: str = option("Address to listen on; 0.0.0.0 allows other machines.", default=shared.LOOPBACK[0])
    port: int = option("Port to listen on.", default=8000, min=1, max=65_535)
    gpus: int | None = option("Number of GPUs, each with a process.", min=1, show_default="all, or that of --device")
    engine: Literal["process", "ray"] = shared.engine_option("requests run: on this machine")
    loras: list[str] | None = option("LoRA that requests choose by name. Repeatable.", metavar="NAME=LORA|FOLDER")
    actors: int | None = shared.actors_option()
    api_key_file: Path | None = option(
        "File with one API key per line, at least 16 characters each. Clients send one as `Authorization: Bearer KEY`.",
        show_default="no key is needed",
    )
    allow_host: list[str] | None = option(
        "Further host name that requests and web pages may have if there are no keys. Repeatable.",
        metavar="NAME",
        show_default="localhost, 127.0.0.1 and ::1; any with another --host",
    )
    queue: int = option("Maximum number of waiting requests; more get status 503.", default=16, min=0, max=100_000)
    batch_size: int = option(
        "Most images or videos that waiting requests make in one call.",
        "--batch-size",
        "--batch",
        default=1,
        min=1,
        max=shared.MOST_IMAGES,
    )
    max_side: int = option("Largest height or width of a request.", default=2048, min=16, max=shared.MOST_PIXELS)
    max_steps: int = option("Most steps of a request.", default=100, min=1, max=shared.MOST_STEPS)
    max_images: int = option("Most images of a request.", default=4, min=1, max=shared.MOST_IMAGES)
    max_frames: int = option("Most frames of a video.", default=300, min=1, max=shared.MOST_FRAMES)
    max_videos: int = option("Most finished videos of each API key, for an hour.", default=64, min=1, max=10_000)
    max_video_bytes: int = option("Most bytes of a key's finished videos.", default=4 * 2**30, min=2**20, max=2**50)
    max_body: int = option("Most bytes of a request's body.", default=65_536, min=1024, max=2**30)
    max_upload: int = option("Most bytes of a request's body with an image.", default=20 * 2**20, min=1024, max=2**30)
    max_seconds: float = option(
        "Most seconds of a request for images, queue included; of a video's run.", default=600.0, min=1, max=86_400
    )
    max_step_seconds: float = option(
        "Most seconds per sample of a step, encoding or decoding; then a new process.", default=300.0, min=1, max=86_400
    )
    log_json: bool = option("Log as lines of JSON, also one for each request.", "--log-json", default=False)

    @property
    def hosts(self) -> set[str]:
        """Names that requests without keys may address; empty = any."""
        for name in self.allow_host or ():
            if set("/*@ ") & set(name) or name.count(":") == 1:
                rule = "must be a name without scheme, port and *, such as images.example.com"
                raise ArgumentError("allow_host", f"{rule}, got {shown(name)}")
        if self.host not in shared.LOOPBACK and not self.allow_host:
            return set()
        return {self.host, *shared.LOOPBACK, *(name.lower() for name in self.allow_host or ())}

    def limits(self) -> Any:
        from dit_accel.serving.http.api import Limits

        return Limits(**{it.name: getattr(self, f"max_{it.name}", it.default) for it in fields(Limits)})


@takes_options(without=("model", "steps", "seed", "height", "width", "num_frames", "image", "force"))
def command(options: ServeOptions) -> None:
    """Serve images or videos over HTTP, with OpenAI's interface.

    dit-accel serve --model black-forest-labs/FLUX.1-dev --api-key-file keys.txt --host 0.0.0.0

    curl localhost:8000/v1/images/generations -d '{"prompt": "a yellow ring", "preset": "turbo", "seed": 7}'
    """
    for package in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        require_extra(package, "dit-accel serve")
    from dit_accel.serving.dispatcher import Dispatcher
    from dit_accel.serving.http import server
    from dit_accel.serving.http.api import Served
    from dit_accel.serving.http.videos import VideoStore

    require_engine(options.engine, options.actors, options.device)
    if options.engine == "ray" and options.gpus is not None:
        raise ArgumentError("gpus", "can't be used with --engine ray; limit the number of GPUs with --actors")
    if options.engine == "ray" and options.max_models > 1:
        raise ArgumentError("max_models", "must be 1 with --engine ray, where each model takes a GPU")
    keys, hosts, limits = read_keys(options.api_key_file), options.hosts, options.limits()
    models = named_models(options.models or [shared.DEFAULT_MODEL])
    name, *others = models
    if others and (options.lora or options.call):
        raise ArgumentError("lora" if options.lora else "call", "is for one model: give LoRAs by --loras, or serve one")
    runs = {key: replace(options, model=model).preset_and_loading()[:2] for key, model in models.items()}
    options = replace(options, model=models[name])
    loading = replace(options.loading(), named_loras=named_loras(options.loras))
    call, size = parse_call(options.call), options.batch_size
    if size > 1 and "image" in call:
        rule = "must be 1 with --call image=…: pipelines treat an image in a batch differently"
        raise ArgumentError("batch_size", rule)
    setup = Setup(options.model, *runs[name], loading=loading, call=call, batch_size=size)
    bound = server.bound_socket(options.host, options.port)
    console = Console(quiet=options.quiet)
    if options.host not in shared.LOOPBACK and not keys:
        console.out(f"note: {options.host} needs no API key; --api-key-file restricts access", highlight=False)
    where = f"[{options.host}]" if ":" in options.host else options.host
    with _places(options, setup, console) as (setups, start), server.ended_by_signals(), ExitStack() as closing:
        workers: list[RemoteWorker] = []
        signal.signal(signal.SIGUSR1, lambda *_: [worker.reload() for worker in workers])
        for place in setups:
            of_models = {key: replace(place, model=models[key], preset=p, overrides=o) for key, (p, o) in runs.items()}
            with server.signals_held():
                most = {"models": of_models, "most": options.max_models}
                workers.append(RemoteWorker(of_models[name], options.max_step_seconds, start, **most))
                closing.callback(workers[-1].close)
        with console.status(f"loading {shortened(options.model)}"):
            loaded, *_ = [worker.wait() for worker in workers]
        if loaded.form is not None:
            require_extra("imageio-ffmpeg", "dit-accel serve with a model of videos")
        videos = closing.enter_context(VideoStore(limits))
        dispatcher = Dispatcher(workers, options.queue, options.batch_size)
        served = Served(name, loaded.requested, limits, loaded.form, loading.named_loras)
        app = server.build_app(dispatcher, served, keys, hosts, videos, others)
        bound.listen()
        console.out(f"ready at http://{where}:{options.port} (stop with Ctrl-C)", highlight=False)
        server.serve(app, dispatcher, bound, limits, options.log_json)


@contextmanager
def _places(options: ServeOptions, setup: Setup, console: Console) -> Iterator[tuple[list[Setup], Callable]]:
    """Yield the setups of workers and what starts one; Ray sets a handler of SIGTERM, so the server's comes later."""
    if options.engine == "process":
        devices = _devices(options)
        yield [replace(setup, loading=replace(setup.loading, device=device)) for device in devices], LocalProcess
        return
    with joined_cluster(setup, options.actors, console) as (setup, count, needs):
        yield [setup] * count, partial(RayActor, needs)


def _devices(options: ServeOptions) -> list[str | None]:
    there = 0
    if options.device in (None, "cuda"):
        import torch  # takes seconds, and another device needs it in its own process only

        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there == 0:
        if options.gpus is not None:
            found = "there is none" if options.device in (None, "cuda") else f"--device is {options.device}"
            raise ArgumentError("gpus", f"needs CUDA GPUs, but {found}")
        return [options.device]
    if options.gpus is not None and options.gpus > there:
        raise ArgumentError("gpus", f"must be at most {there}, the number of GPUs here, got {options.gpus}")
    return [f"cuda:{index}" for index in range(options.gpus or there)]


def named_models(texts: list[str]) -> dict[str, str]:
    """Parse ``["NAME=MODEL", "MODEL", …]`` into models by the names that clients use; a folder's hides its path."""
    models: dict[str, str] = {}
    for text in texts:
        name, equals, model = text.partition("=")
        folder = os.path.expanduser(text)
        if not equals or os.path.isdir(folder):
            name, model = Path(folder).resolve().name if os.path.isdir(folder) else text, text
        if not name or name in models:
            raise ArgumentError("model", f"must have names that differ, as NAME=MODEL, got {shown(text)}")
        if len(texts) > 1:
            resolve_model(model)  # the first one's process does so anyway
        models[name] = model
    return models


def read_keys(path: Path | None) -> list[str]:
    keys = [] if path is None else read_prompts(path, "api_key_file", "keys")
    if any(len(key) < SHORTEST_KEY for key in keys):
        rule = f"one key per line, each of at least {SHORTEST_KEY} characters"
        raise ArgumentError("api_key_file", f"{shortened(str(path))} must hold {rule}")
    return keys
