"""Look of the page of ``dit-accel app``: its heading, style and colours.

On a phone the results come before the settings; on a wide screen they are at the right of prompt and settings.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gradio

DOCS = "https://github.com/dit-accel/dit-accel/blob/main/docs"
FACE = f"""# dit-accel
One prompt, two runs from the same noise, plain and accelerated: compare the time and the result.
[About this page]({DOCS}/guide/app.md) · [Presets]({DOCS}/guide/choosing.md) ·
[How it works]({DOCS}/reference/concepts.md)
"""
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


@cache
def theme() -> gradio.themes.Base:
    """Return the page's colours, and fonts that every machine has."""
    import gradio as gr

    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}
    return gr.themes.Default(primary_hue="blue", neutral_hue="slate", **fonts)
