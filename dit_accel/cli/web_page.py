"""Page of ``dit-accel app``, built with Gradio.

A prompt comes first, then results, then settings. On a wide screen the results are at the right of both.

Annotations are evaluated here, because Gradio passes the request to functions that annotate it.
"""

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dit_accel.cli.web_form import (
    LABELS,
    NUMBERS,
    Fields,
    Loaded,
    fields_of,
    in_the_pages_words,
    preset_of,
    target_of,
    words_note,
)
from dit_accel.cli.web_look import FACE
from dit_accel.cli.web_view import View
from dit_accel.errors import DitAccelError
from dit_accel.presets import Preset
from dit_accel.presets.names import DEFAULT
from dit_accel.serving.loading import resolve_model
from dit_accel.tools.playground import LONGEST_PROMPT, Playground, Run, Wish

if TYPE_CHECKING:
    import gradio

REMEMBERED = 12  # results of a session
MOST_VISITORS = 20  # runs that wait at once; others are queued by gradio
TAB_SELECTS = """() => document.querySelector("#preset").addEventListener("keydown", (event) => {
    if (event.key !== "Tab") return;
    event.stopPropagation();
    document.getElementById(event.target.getAttribute("aria-activedescendant"))
        ?.dispatchEvent(new MouseEvent("mousedown", {bubbles: true}));
}, true)"""  # as Enter does: with Tab, gradio drops what was typed and leaves the list open
LONGEST_KEPT = 24 * 3600  # seconds that an output file is kept


def build_page(
    playground: Playground, loaded: Mapping[str, Loaded], model: str, models: list[str], *, any_model: bool
) -> "gradio.Blocks":
    """Build the page; the caller launches it with the style of `web_look`.

    Args:
        loaded: models that the playground has loaded; it must have the first one.
        model: selected at first.
        models: offered in the list.
        any_model: whether visitors may enter other models, which are then loaded.
    """
    import gradio as gr

    runs: dict[str, Run] = {}  # by session

    def suited(name: str) -> Fields:
        return fields_of(name, loaded[name].pipe if name in loaded else None)

    first = suited(model)
    examples = {text for name in models for text in suited(name).examples}

    def make(
        prompt: str,
        model: str,
        preset: str,
        own_target: bool,
        target: float,
        seed: float | None,
        steps: float | None,
        height: float | None,
        width: float | None,
        num_frames: float | None,
        history: list[tuple[Any, str]],
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        numbers = [*map(_whole, (seed or 0, steps, height, width, num_frames))]
        wish = Wish(prompt, model, preset, None if own_target else target, *numbers)
        try:
            run = runs[request.session_hash] = playground.start(wish)
            with TemporaryDirectory() as folder:
                view = View(wish, loaded, Path(folder))
                try:
                    for event in run:
                        if view.take(event):
                            yield shown(view, history)
                finally:
                    run.cancel()
        except Exception as error:
            yield {status: f"**Failed.** {_as_text(error)}"}
            raise gr.Error(_as_text(error), print_exception=not isinstance(error, DitAccelError)) from error

    def shown(view: View, history: list[tuple[Any, str]]) -> dict[Any, Any]:
        """Return the changed components of the page."""
        changes = {status: view.status, figures: view.figures, timelines: view.timelines()}
        if view.is_finished:
            history[:] = [(view.pictures()[1], view.caption), *history][:REMEMBERED]
            video = view.video()
            changes |= {
                preview: gr.update(value=None, visible=False),
                clip: gr.update(value=video, visible=video is not None),
                beside: gr.update(value=view.pictures(), visible=True, label=_of_both(video is not None)),
                session: history,
                gallery: gr.update(value=history, visible=True),
            }
        elif (new := view.new_preview()) is not None:
            image, label = new
            hidden = gr.update(visible=False)
            changes |= {preview: gr.update(value=image, label=label, visible=True), beside: hidden, clip: hidden}
        return changes

    def stop(request: gr.Request) -> None:
        run = runs.pop(request.session_hash, None)
        if run is not None:
            run.cancel()

    def suit_model(name: str, prompt: str, preset: str) -> dict[Any, Any]:
        """Show the values of another model; a prompt of the visitor's stays."""
        try:
            if name not in models:
                resolve_model(name)
            fields = suited(name)
        except DitAccelError as error:
            return {status: f"**Failed.** {_as_text(error)}"}
        prompt = fields.examples[0] if prompt in examples else prompt
        preset = preset if preset in [value for _, value in fields.presets] else DEFAULT
        changes = suit_preset(preset, name)
        changes[chosen] |= {"choices": fields.presets, "value": preset}
        numbers = {
            box: gr.update(value=fields.numbers[field], visible=field != "num_frames" or fields.is_video)
            for field, box in boxes.items()
        }
        texts = {asked: prompt, note: noted(name, prompt), **dict(zip(buttons, fields.examples, strict=True))}
        return changes | numbers | texts

    def suit_preset(preset: str, name: str) -> dict[Any, Any]:
        try:
            fields = suited(name)
        except DitAccelError as error:
            return {status: f"**Failed.** {_as_text(error)}"}
        settings = preset_of(preset, is_video=fields.is_video)
        value = target_of(settings)
        return {
            chosen: gr.update(info=_described(settings)),
            own: gr.update(visible=value is not None, value=True),
            target: gr.update(visible=value is not None, **({} if value is None else {"value": value})),
        }

    def noted(name: str, prompt: str) -> Any:
        text = words_note(name, prompt)
        return gr.update(value=text, visible=bool(text))

    def fill_numbers(name: str, *values: float | None) -> list[float | None]:
        """Fill empty numbers, once a model is loaded that was not known before."""
        own_numbers = suited(name).numbers if name in loaded else dict.fromkeys(NUMBERS)
        return [own_numbers[field] if value is None else value for field, value in zip(NUMBERS, values, strict=True)]

    def number(field: str, value: int | None, visible: bool = True) -> gr.Number:
        return gr.Number(value, label=LABELS[field], placeholder="model's own", min_width=90, visible=visible)

    with gr.Blocks(
        title="dit-accel: plain and accelerated", analytics_enabled=False, delete_cache=(3600, LONGEST_KEPT)
    ) as page:
        session = gr.State([])
        gr.Markdown(FACE, elem_id="face")
        with gr.Row(elem_id="layout"):
            with gr.Column(elem_id="ask"):
                asked = gr.Textbox(first.examples[0], label=LABELS["prompt"], lines=2, max_length=LONGEST_PROMPT)
                note = gr.Markdown(visible=False, elem_id="note")
                with gr.Row(elem_id="examples"):
                    buttons = [gr.Button(text, size="sm") for text in first.examples]
                with gr.Row():
                    begin = gr.Button("Generate both", variant="primary", scale=2, min_width=150)
                    cancel = gr.Button("Cancel", scale=1, min_width=80)
            with gr.Column(elem_id="results"):
                status = gr.Markdown("No results yet: press *Generate both*.")
                preview = gr.Image(type="pil", format="jpeg", interactive=False, visible=False, buttons=[], height=420)
                clip = gr.Video(label="Both videos", show_label=False, visible=False, autoplay=True, loop=True)
                beside = gr.ImageSlider(
                    type="pil", format="png", interactive=False, visible=False, max_height=520, label=_of_both(False)
                )
                figures = gr.Markdown()
                timelines = gr.HTML()
            with gr.Column(elem_id="settings"):
                models_box = gr.Dropdown(
                    models,
                    value=model,
                    label=LABELS["model"],
                    info="A demo model, an id on the Hugging Face Hub, or a folder." if any_model else None,
                    allow_custom_value=any_model,
                )
                settings = preset_of(DEFAULT, is_video=first.is_video)
                chosen = gr.Dropdown(
                    first.presets,
                    value=DEFAULT,
                    label=LABELS["preset"],
                    info=_described(settings),
                    elem_id="preset",
                )
                own = gr.Checkbox(True, label="The preset's own target_error")
                target = gr.Slider(
                    0.01,
                    1,
                    value=target_of(settings),
                    step=0.01,
                    label="target_error",
                    info="Lower is closer to plain, higher is faster.",
                    buttons=[],
                )
                with gr.Row():
                    boxes = {"steps": number("steps", first.numbers["steps"])}
                    seed = gr.Number(0, label=LABELS["seed"], min_width=90)
                with gr.Row():
                    boxes |= {
                        field: number(field, first.numbers[field], field != "num_frames" or first.is_video)
                        for field in ("height", "width", "num_frames")
                    }
        gallery = gr.Gallery(
            label="This session",
            columns=6,
            height="auto",
            object_fit="contain",
            interactive=False,
            visible=False,
            elem_id="gallery",
        )

        for button in buttons:
            button.click(None, button, asked, js="text => text", api_visibility="private")
        target.input(None, None, own, js="() => false", api_visibility="private")
        made = gr.on(
            [begin.click, asked.submit, target.release],
            make,
            [asked, models_box, chosen, own, target, seed, *boxes.values(), session],
            [status, preview, clip, beside, figures, timelines, session, gallery],
            api_name="make",
            trigger_mode="once",
            concurrency_limit=MOST_VISITORS,
            show_progress="hidden",
        )
        quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        made.then(fill_numbers, [models_box, *boxes.values()], [*boxes.values()], **quick)
        cancel.click(stop, api_name="cancel", queue=False)
        of_preset = [chosen, own, target, status]
        models_box.change(
            suit_model,
            [models_box, asked, chosen],
            [asked, note, *buttons, *boxes.values(), *of_preset],
            **quick,
        )
        chosen.change(suit_preset, [chosen, models_box], of_preset, **quick)
        own.input(suit_preset, [chosen, models_box], of_preset, **quick)
        asked.change(noted, [models_box, asked], note, trigger_mode="always_last", **quick)
        page.load(None, js=TAB_SELECTS, api_visibility="private")
        page.unload(stop)
    return page


def _as_text(error: Exception) -> str:
    """Return an error's message as HTML; it may contain what a visitor entered."""
    return html.escape(in_the_pages_words(error), quote=False)


def _whole(value: float | None) -> float | None:
    """Return a whole number as an int, and any other unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _described(preset: Preset) -> str:
    """Return the preset's description as a sentence."""
    fixed = "" if target_of(preset) is not None else "; it has no target_error"
    return f"{preset.description[0].upper()}{preset.description[1:]}{fixed}."


def _of_both(is_video: bool) -> str:
    return "Middle frame: plain | accelerated" if is_video else "Plain | accelerated"
