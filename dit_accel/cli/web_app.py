"""``dit-accel app``: a browser page that compares the plain and the accelerated output."""

import os
from dataclasses import dataclass, replace

from rich.console import Console

from dit_accel.cli.options import LOOPBACK, LoadingOptions, option, takes_options
from dit_accel.errors import ArgumentError, shortened
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.worker import Worker
from dit_accel.tools.demo import demo_names
from dit_accel.tools.extras import require_extra

THEME = {"primary_hue": "blue", "neutral_hue": "slate", "font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}
# On a phone the results come before the settings; on a wide screen they are at the right of prompt and settings.
CSS = """
#face h1 { margin: 0; }
#face a { white-space: nowrap; }
#layout {
  display: grid; align-items: start; gap: var(--layout-gap);
  grid-template: "ask results" auto "settings results" 1fr / minmax(300px, 2fr) minmax(0, 3fr);
}
#layout > * { min-width: 0 !important; }
#ask { grid-area: ask; gap: 8px; } #results { grid-area: results; } #settings { grid-area: settings; }
#note { max-height: 6em; overflow: auto; font-size: 0.85em; }
#examples { gap: 6px; }
#examples button { min-width: 0; justify-content: flex-start; text-align: left; font-weight: 400; white-space: normal; }
#results th, #results td { padding: 3px 10px; overflow-wrap: normal; word-break: normal; }
#gallery .grid-wrap { height: auto; max-height: none; min-height: 0; padding-top: 36px; }
#gallery .grid-container { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
#gallery .caption-label {
  max-width: 100%; white-space: normal; display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3;
  padding-bottom: 0;
}
#gallery .caption { max-width: 100%; white-space: normal; }
.steps p { display: flex; flex-wrap: wrap; gap: 0 12px; margin: 8px 0 4px; }
.steps > div { position: relative; padding-left: 44px; }
.steps svg { display: block; width: 100%; height: 100px; }
.steps small { position: absolute; left: 0; top: 0; width: 38px; text-align: right; }
.steps small + small { top: auto; bottom: 0; }
@media (max-width: 768px) {
  #layout { grid-template: "ask" "results" "settings" / minmax(0, 1fr); }
  #face { font-size: 0.9em; }
  #examples { flex-direction: column; gap: 4px; }
  #examples button { display: block; max-width: 100%; padding: 2px 8px; }
  #examples button { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }
  #results table { font-size: 0.85em; }
  #results th, #results td { padding: 3px 6px; }
}
"""


@dataclass(frozen=True, kw_only=True)
class AppOptions(LoadingOptions):
    host: str = option("Address to listen on; 0.0.0.0 allows other machines.", default=LOOPBACK[0])
    port: int = option("Port to listen on.", default=7860, min=1, max=65_535)
    share: bool = option(
        "Also open a public address for three days, through Gradio's service.", "--share", default=False
    )


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
        if worker.video_form is not None:
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
            css=CSS,
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
