"""Commands without work: the calls into the library are recorded, and nothing is loaded, run or plotted."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import dit_accel
from dit_accel.cli import compare, generate, inspect, serve, tune, web_page
from dit_accel.cli.comparison import Side, Sides
from dit_accel.serving import dispatcher, pipelines, playground
from dit_accel.serving.http import server
from dit_accel.serving.worker import Worker
from dit_accel.tools.advise import recommend
from dit_accel.tools.measure import compare as comparing
from dit_accel.tools.measure import tune as tuning
from dit_accel.tools.measure.timing import Output
from dit_accel.tools.media import figures, video
from tests.tiny import tiny_pipeline

CLIPS = "some/clips"  # name of a model that makes videos; all others make images


@pytest.fixture(scope="session")
def model(saved):
    return saved("flux")


@pytest.fixture(scope="session")
def made():
    """Pipelines by the model's name, with the results of their calls."""
    picture, clip = Image.new("RGB", (16, 16)), np.zeros((5, 16, 16, 3), dtype=np.uint8)
    return {"pictures": (tiny_pipeline("flux-kontext"), picture), CLIPS: (tiny_pipeline("wan"), clip)}


class Report:
    computed_fraction, notes = 0.5, ()

    def to_json(self):
        return {"notes": [], "steps_by_mode": {"dispatch": 1}}


@pytest.fixture
def reached(monkeypatch, made, tmp_path):
    """Calls of a command into the library, by name; nothing is loaded, run or plotted."""
    seen = {}

    def put(prefix="", **facts):
        seen.update({prefix + name: value for name, value in facts.items()})

    def load(model, how, console, *_):
        put(model=model, **vars(how) | {"loras": dict(how.loras)})
        return made[CLIPS if model == CLIPS else "pictures"][0]

    def note_call(prefix, arguments):
        shown = {
            key: each.getpixel((0, 0)) if isinstance(each, Image.Image) else each for key, each in arguments.items()
        }
        put(prefix, **shown)

    def call(pipe, arguments, seed):
        note_call("call.", arguments)
        put(seed=seed)
        result = next(result for each, result in made.values() if each is pipe)
        return Output([result] * arguments.get("num_images_per_prompt", 1), 2.0, 1.0, 4)

    def accelerate(pipe, preset):
        put(preset=preset.name, target_error=preset.schedule.target_error)
        pipe.dit_accel = SimpleNamespace(report=Report, preset=preset)
        return pipe

    def both(pipe, arguments, seed, preset, repeats, console, *, whole):
        sides = [Side(call(pipe, arguments, seed), [1.0] * repeats) for _ in range(2)]
        put(preset=preset.name, target_error=preset.schedule.target_error, repeats=repeats, whole=whole)
        return Sides(*sides, Report())

    def draw(_, path):
        path.touch()

    def write(clip, path, fps, folder=None):
        put(fps=fps)
        path.touch()

    for module in (pipelines, inspect, tune, compare):
        monkeypatch.setattr(module, "load_pipeline", load)
    for module in (generate, inspect):
        monkeypatch.setattr(module, "timed_call", call)
    monkeypatch.setattr(dit_accel, "accelerate_pipeline", accelerate)
    monkeypatch.setattr(dit_accel, "restore_pipeline", lambda pipe: pipe)
    monkeypatch.setattr(generate, "both_sides", both)
    monkeypatch.setattr(video, "write_clip", write)
    for name in ("timeline_figure", "density_figure"):
        monkeypatch.setattr(figures, name, draw)
    monkeypatch.setattr(inspect, "_require_symbols", lambda *_: None)
    monkeypatch.setattr(inspect, "_draw_symbols", lambda *given: put(layer=given[2], folder=given[3].name))

    def search(pipe, base, *, arguments, progress, state, **rest):
        note_call("arguments.", arguments)
        put(base=base, state=state.name, **rest)
        return SimpleNamespace(
            write=lambda path: put(written=str(path)),
            plot=lambda path: put(plotted=str(path)),
            setting={},
            figures=dict,
            met=True,
        )

    monkeypatch.setattr(tuning, "tune", search)

    class Bench:
        def __init__(self, load, arguments, prompts, tuning_prompt, begin, repeats, plain_steps):
            self.pipe, self.device = load(), "cpu"
            note_call("arguments.", arguments)
            put(
                prompts=[(each.prompt, each.seed) for each in prompts],
                tuning_seed=tuning_prompt.seed,
                tuning_prompt=tuning_prompt.prompt,
                repeats=repeats,
                whole=plain_steps is None,
            )

    class Sweep:
        document = None

        def __init__(self, stem, facts):
            put(stem=stem.name)
            seen["facts"] = facts

        describe = missing = publish = lambda *_: []

    monkeypatch.setattr(comparing, "Bench", Bench)
    monkeypatch.setattr(comparing, "Sweep", Sweep)
    monkeypatch.setattr(compare, "_print_summary", lambda console, _: console.print("figures"))

    def methods(bench, presets, model, peers, settings):
        put(presets=presets, peers=peers, settings=settings)
        return [], {}

    monkeypatch.setattr(compare, "_methods", methods)

    def advise(model, **facts):
        put(model=model, **facts)
        identity = SimpleNamespace(name=model, title=model)
        return SimpleNamespace(choices=(), model=identity, notes=(), python="", shell="")

    monkeypatch.setattr(recommend, "recommend", advise)

    class Blocks:
        def launch(self, *, theme, share, **where):
            put(share=share, **where)
            return None, "http://local/", "http://public/" if share else None

        def block_thread(self):
            pass

    def build(_, model, offered, *, any_model):
        put(offered=offered[0], any_model=any_model)
        return SimpleNamespace(blocks=Blocks())

    monkeypatch.setattr(web_page, "Page", build)
    monkeypatch.setattr(
        playground, "Playground", lambda open_worker: SimpleNamespace(load=open_worker, close=lambda: put(closed=True))
    )

    class Serving:
        def __init__(self, setup, patience, start, models, most):
            put(patience=patience, **setup.call)
            self.setup = setup

        def wait(self):
            return Worker(self.setup).loaded

        def close(self):
            put(closed=True)

        def reload(self):
            put(reloaded=seen.get("reloaded", 0) + 1)

    bound = SimpleNamespace(listen=lambda: None)
    monkeypatch.setattr(serve, "RemoteWorker", Serving)
    monkeypatch.setattr(dispatcher, "Dispatcher", lambda workers, most, size: put(queue=most))
    monkeypatch.setattr(server, "bound_socket", lambda host, port: put(server_name=host, server_port=port) or bound)
    monkeypatch.setattr(
        server,
        "build_app",
        lambda *_: put(served=_[1].model, form=_[1].form, keys=_[2], hosts=_[3], store=_[4], others=_[5]),
    )
    monkeypatch.setattr(
        server, "serve", lambda app, dispatcher, bound, limits, log_json: put(log_json=log_json, **vars(limits))
    )
    return seen


@pytest.fixture
def handed_on(run, reached, tmp_path):
    """Run a command in a folder with images and prompts; return its calls, files and output."""
    for index, level in enumerate((0, 99)):
        Image.new("RGB", (16, 16), (level,) * 3).save(tmp_path / ("black.png", "grey.png")[index])
    (tmp_path / "two.txt").write_text("a cat\na dog\n")
    (tmp_path / "keys.txt").write_text("a-long-enough-key\n\nanother-long-key\n")
    before = set(tmp_path.iterdir())

    def invoke(*arguments):
        reached.clear()
        (tmp_path / "output.png").write_bytes(b"before")
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        reached.pop("store", None)  # which differs between calls
        new = set(tmp_path.iterdir()) - before
        files = {path.name for path in new if path.is_file() and path.read_bytes() != b"before"}
        opened = "".join(re.findall(r"open (\S+)", result.stdout))
        for path in new:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {**reached, "files": files, "prints": bool(result.output), "opened": opened}

    return invoke
