"""``dit-accel app``: a browser page that compares the plain and the accelerated output."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from dit_accel.cli.options import LOOPBACK, LoadingOptions, option, takes_options
from dit_accel.errors import ArgumentError, shortened
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.worker import Worker
from dit_accel.tools.demo import demo_names
from dit_accel.tools.extras import require_extra

CSS = Path(__file__).with_suffix(".css")
THEME = {"primary_hue": "blue", "neutral_hue": "slate", "font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}


@dataclass(frozen=True, kw_only=True)
class AppOptions(LoadingOptions):
    host: str = option("Address to listen on; 0.0.0.0 allows other machines.", default=LOOPBACK[0])
    port: int = option("Port to listen on.", default=7860, min=1, max=65_535)
    share: bool = option("Also open a public address for three days, by Gradio's service.", "--share", default=False)


@takes_options()
def command(options: AppOptions) -> None:
    """Open a browser page: enter a prompt, see the plain and the accelerated output, and each step as it runs.

    dit-accel app

    dit-accel app --model black-forest-labs/FLUX.1-dev --port 8000
    """
    require_extra("gradio", "dit-accel app")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio: no telemetry, no check for newer versions
    import gradio as gr

    from dit_accel.cli.web_page import Page
    from dit_accel.serving.playground import Playground

    console, loading, model = Console(), options.loading(), options.model

    def open_worker(name: str) -> Worker:
        options_of_model = loading if name == model else replace(loading, loras={})
        with console.status(f"loading {name}"):
            worker = Worker(Setup(name, "none", loading=options_of_model))
        if worker.loaded.form is not None:
            require_extra("imageio-ffmpeg", f"{shortened(name)}, which makes videos,")
        return worker

    playground = Playground(open_worker)
    playground.load(model)
    offered = list(dict.fromkeys([model, *demo_names()]))
    page = Page(playground, model, offered, any_model=options.host in LOOPBACK and not options.share).blocks
    try:
        _, local, public = page.launch(
            server_name=options.host,
            server_port=options.port,
            share=options.share,
            quiet=True,
            ssr_mode=False,
            css_paths=CSS,
            theme=gr.themes.Default(**THEME),
            footer_links=["api", "settings"],
            prevent_thread_lock=True,
        )
    except OSError:
        message = f"can't listen on {options.host}:{options.port}; give another --host or --port"
        raise ArgumentError("port", message) from None
    console.out(f"open {public or local} (stop with Ctrl-C)", highlight=False)
    try:
        page.block_thread()
    finally:
        playground.close()
