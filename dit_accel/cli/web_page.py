"""Page of ``dit-accel app``, built with Gradio, which queues its runs and ends those of visitors who cancel or leave.

A prompt comes first, then results, then settings. On a wide screen the results are at the right of both.
"""

import html
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dit_accel.cli import web_texts
from dit_accel.errors import DitAccelError
from dit_accel.presets import Preset, default_preset, load_preset
from dit_accel.presets.loading import DEFAULT
from dit_accel.serving.loading import resolve_model
from dit_accel.serving.playground import LONGEST_PROMPT, ComparisonRun, Playground, Wish

DOCS = "https://github.com/dit-accel/dit-accel/blob/main/docs"
FACE = f"""# dit-accel
One prompt, two runs from the same noise, plain and accelerated: compare the time and the result.
[About this page]({DOCS}/guide/app.md) · [Presets]({DOCS}/guide/choosing.md) ·
[How it works]({DOCS}/reference/concepts.md)
"""
REMEMBERED = 12  # results of a session
TAB_SELECTS = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
LONGEST_KEPT = 24 * 3600  # seconds that an output file is kept


class Page:
    """The page, as ``blocks``. The playground has loaded the first model; ``any_model`` lets visitors enter others."""

    def __init__(self, playground: Playground, model: str, models: list[str], *, any_model: bool) -> None:
        import gradio as gr

        self._playground, self._models = playground, models
        self._examples = {text for name in models for text in self._fields(name).examples}
        first = self._fields(model)
        with gr.Blocks(
            title="dit-accel: plain and accelerated", analytics_enabled=False, delete_cache=(3600, LONGEST_KEPT)
        ) as self.blocks:
            self._session = gr.State([])
            gr.Markdown(FACE, elem_id="face")
            with gr.Row(elem_id="layout"):
                with gr.Column(elem_id="ask"):
                    self._prompt = gr.Textbox(
                        first.examples[0], label=web_texts.LABELS["prompt"], lines=2, max_length=LONGEST_PROMPT
                    )
                    self._note = gr.Markdown(visible=False, elem_id="note")
                    with gr.Row(elem_id="examples"):
                        self._buttons = [gr.Button(text, size="sm") for text in first.examples]
                    with gr.Row():
                        self._begin = gr.Button("Generate both", variant="primary", scale=2, min_width=150)
                        self._cancel = gr.Button("Cancel", scale=1, min_width=80)
                with gr.Column(elem_id="results"):
                    self._lay_out_results()
                with gr.Column(elem_id="settings"):
                    self._lay_out_settings(first, model, any_model)
            self._gallery = gr.Gallery(
                label="This session",
                columns=6,
                height="auto",
                object_fit="contain",
                interactive=False,
                visible=False,
                elem_id="gallery",
            )
            self._connect()

    def _lay_out_results(self) -> None:
        import gradio as gr

        self._status = gr.Markdown("No results yet: press *Generate both*.")
        self._preview = gr.Image(
            type="pil", format="jpeg", interactive=False, visible=False, buttons=[], height=420, label="Plain"
        )
        self._video = gr.Video(label="Both videos", show_label=False, visible=False, autoplay=True, loop=True)
        self._slider = gr.ImageSlider(type="pil", format="png", interactive=False, visible=False, max_height=520)
        self._figures = gr.Markdown()
        self._timelines = gr.HTML()

    def _lay_out_settings(self, first: web_texts.Fields, model: str, any_model: bool) -> None:
        import gradio as gr

        settings = load_preset(default_preset(DEFAULT, is_video=first.is_video))
        self._model = gr.Dropdown(
            self._models,
            value=model,
            label=web_texts.LABELS["model"],
            info="A demo model, an id on the Hugging Face Hub, or a folder." if any_model else None,
            allow_custom_value=any_model,
        )
        self._preset = gr.Dropdown(
            first.presets, value=DEFAULT, label=web_texts.LABELS["preset"], info=_described(settings), elem_id="preset"
        )
        self._own_target = gr.Checkbox(True, label="The preset's own target_error")
        self._target = gr.Slider(
            0.01,
            1,
            value=web_texts.target_of(settings),
            step=0.01,
            label="target_error",
            info="Lower is closer to plain, higher is faster.",
            buttons=[],
        )
        with gr.Row():
            self._numbers = {"steps": _number("steps", first)}
            self._seed = gr.Number(0, label=web_texts.LABELS["seed"], min_width=90)
        with gr.Row():
            self._numbers |= {field: _number(field, first) for field in ("height", "width", "num_frames")}

    def _connect(self) -> None:
        import gradio as gr

        quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        numbers = list(self._numbers.values())
        for button in self._buttons:
            button.click(None, button, self._prompt, js="text => text", api_visibility="private")
        self._target.input(None, None, self._own_target, js="() => false", api_visibility="private")
        choices = [self._prompt, self._model, self._preset, self._own_target, self._target, self._seed, *numbers]
        results = [self._preview, self._video, self._slider, self._figures, self._timelines]
        run = gr.on(
            [self._begin.click, self._prompt.submit, self._target.release],
            self.make,
            [*choices, self._session],
            [self._status, *results, self._session, self._gallery],
            api_name="make",
            trigger_mode="once",
            concurrency_limit=1,
            show_progress="minimal",
            show_progress_on=self._status,
        )
        run.then(self.fill_numbers, [self._model, *numbers], numbers, **quick)
        self._cancel.click(_cancelled, self._status, self._status, cancels=run, **quick)
        of_preset = [self._preset, self._own_target, self._target, self._status]
        of_model = [self._prompt, self._note, *self._buttons, *numbers, *of_preset]
        self._model.change(self.suit_model, [self._model, self._prompt, self._preset], of_model, **quick)
        for event in (self._preset.change, self._own_target.input):
            event(self.suit_preset, [self._preset, self._model], of_preset, **quick)
        self._prompt.change(_noted, [self._model, self._prompt], self._note, trigger_mode="always_last", **quick)
        self.blocks.load(None, js=TAB_SELECTS, api_visibility="private")

    def make(
        self,
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
    ) -> Iterator[dict[Any, Any]]:
        import gradio as gr

        boxes = (seed or 0, steps, height, width, num_frames)
        numbers = (int(value) if isinstance(value, float) and value.is_integer() else value for value in boxes)
        wish = Wish(prompt, model, preset, None if own_target else target, *numbers)
        preview = None
        try:
            for run in self._playground.compare(wish):
                changes = {
                    self._status: web_texts.status(run),
                    self._figures: web_texts.figures(run),
                    self._timelines: web_texts.timelines(run),
                }
                if run.comparison is not None:
                    with TemporaryDirectory() as folder:
                        yield changes | self._finished(run, history, Path(folder))
                elif run.preview is preview:
                    yield changes
                else:
                    preview = run.preview
                    state = "; the accelerated side follows" if "plain" in run.outputs else ", a coarse preview"
                    shown = _update(value=preview, label=f"Plain{state}", visible=True)
                    hidden = _update(visible=False)
                    yield changes | {self._preview: shown, self._slider: hidden, self._video: hidden}
        except Exception as error:
            yield {self._status: f"**Failed.** {_as_text(error)}"}
            raise gr.Error(_as_text(error), print_exception=not isinstance(error, DitAccelError)) from error

    def _finished(self, run: ComparisonRun, history: list[tuple[Any, str]], folder: Path) -> dict[Any, Any]:
        images, video = web_texts.images(run), web_texts.video(run, folder)
        history[:] = [(images[1], web_texts.caption(run)), *history][:REMEMBERED]
        label = "Plain | accelerated" if video is None else "Middle frame: plain | accelerated"
        return {
            self._preview: _update(value=None, visible=False),
            self._video: _update(value=video, visible=video is not None),
            self._slider: _update(value=images, visible=True, label=label),
            self._session: history,
            self._gallery: _update(value=history, visible=True),
        }

    def suit_model(self, name: str, prompt: str, preset: str) -> dict[Any, Any]:
        try:
            if name not in self._models:
                resolve_model(name)
            fields = self._fields(name)
        except DitAccelError as error:
            return {self._status: f"**Failed.** {_as_text(error)}"}
        prompt = fields.examples[0] if prompt in self._examples else prompt
        preset = preset if preset in [value for _, value in fields.presets] else DEFAULT
        changes = self.suit_preset(preset, name)
        changes[self._preset] |= {"choices": fields.presets, "value": preset}
        numbers = {
            box: _update(value=fields.numbers[field], visible=field != "num_frames" or fields.is_video)
            for field, box in self._numbers.items()
        }
        texts = {self._prompt: prompt, self._note: _noted(name, prompt)}
        return changes | numbers | texts | dict(zip(self._buttons, fields.examples, strict=True))

    def suit_preset(self, preset: str, name: str) -> dict[Any, Any]:
        try:
            fields = self._fields(name)
        except DitAccelError as error:
            return {self._status: f"**Failed.** {_as_text(error)}"}
        settings = load_preset(default_preset(preset, is_video=fields.is_video))
        value = web_texts.target_of(settings)
        return {
            self._preset: _update(info=_described(settings)),
            self._own_target: _update(visible=value is not None, value=True),
            self._target: _update(visible=value is not None, **({} if value is None else {"value": value})),
        }

    def fill_numbers(self, name: str, *values: float | None) -> list[float | None]:
        """Fill empty numbers, once a model is loaded that was not known before."""
        numbers = {} if self._playground.pipe(name) is None else self._fields(name).numbers
        fields = zip(web_texts.NUMBERS, values, strict=True)
        return [numbers.get(field) if value is None else value for field, value in fields]

    def _fields(self, name: str) -> web_texts.Fields:
        return web_texts.fields_of(name, self._playground.pipe(name))


def _number(field: str, first: web_texts.Fields) -> Any:
    import gradio as gr

    visible = field != "num_frames" or first.is_video
    return gr.Number(
        first.numbers[field], label=web_texts.LABELS[field], placeholder="model's own", min_width=90, visible=visible
    )


def _update(**changes: Any) -> dict[str, Any]:
    import gradio as gr

    return gr.update(**changes)


def _cancelled(status: str) -> str:
    return "Cancelled." if status.endswith("…") else status


def _noted(name: str, prompt: str) -> Any:
    text = web_texts.words_note(name, prompt)
    return _update(value=text, visible=bool(text))


def _as_text(error: Exception) -> str:
    """Return an error's message as HTML; it may contain what a visitor entered."""
    return html.escape(web_texts.in_the_pages_words(error), quote=False)


def _described(preset: Preset) -> str:
    fixed = "" if web_texts.target_of(preset) is not None else "; it has no target_error"
    return f"{preset.description[0].upper()}{preset.description[1:]}{fixed}."
