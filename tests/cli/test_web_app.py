"""``dit-accel app``: its page as gradio's own client and a browser see it, on tiny pipelines, and the command."""

import json
import re
import shutil
import socket
import urllib.request
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from dit_accel.serving import pipelines, playground
from dit_accel.serving.pipelines import Setup
from dit_accel.serving.playground import Playground
from dit_accel.serving.worker import Worker
from tests.forked import free_port, until
from tests.tiny import tiny_pipeline

STEPS = 6
# Outputs of the endpoint /make, but for the state of the session.
OUTPUTS = ("status", "preview", "clip", "beside", "figures", "steps", "gallery")

pipeline = cache(tiny_pipeline)


@pytest.fixture(scope="module")
def asked():
    """Hosts that this process looks up or connects to."""
    hosts = []
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def noted_look_up(host, *rest, **named):
        hosts.append(host)
        return look_up(host, *rest, **named)

    def noted_connect(self, address):
        hosts.append(address[0])
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", noted_look_up)
        patch.setattr(socket.socket, "connect", noted_connect)
        yield hosts


def opened(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "load_pipeline", lambda *_: pipeline(model))
        return Worker(Setup(model, "none"))


@pytest.fixture(scope="module")
def site(asked):
    """The page on a free port, with its playground."""
    import gradio as gr

    from dit_accel.cli.web_app import CSS, THEME
    from dit_accel.cli.web_page import Page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playground, "REFRESH", 0.05)
        shared = Playground(opened)
        shared.load("flux")
        page = Page(shared, "flux", ["flux", "wan"], any_model=False).blocks
        where = {"server_port": free_port(), "prevent_thread_lock": True, "quiet": True, "ssr_mode": False}
        launched = page.launch(**where, css_paths=CSS, theme=gr.themes.Default(**THEME))
        yield SimpleNamespace(url=launched[1], playground=shared, asked_at_start=set(asked))
        page.close(verbose=False)
        shared.close()


@pytest.fixture
def visitor(site, tmp_path):
    from gradio_client import Client

    return lambda: Client(site.url, verbose=False, download_files=tmp_path, analytics_enabled=False)


def begin(client, prompt="a red fox", *, model="flux", target=0.9, seed=0, steps=STEPS, side=32, frames=None):
    how = {"preset": "balanced", "own_target": False, "target": target, "seed": seed, "steps": steps}
    size = {"height": side, "width": side, "num_frames": frames}
    return client.submit(prompt=prompt, model=model, **how, **size, api_name="/make")


def shown(job):
    """State of the page after each event, by name; values that an event does not set stay."""
    job.result(timeout=60)
    pages, page = [], {}
    for values in job.outputs():
        page |= {k: v for k, v in zip(OUTPUTS, values, strict=True) if "__type__" not in v or "value" in v}
        pages.append(dict(page))
    return pages


def expected(prompt, seed=0, steps=STEPS):
    arguments = {"prompt": prompt, "num_inference_steps": steps, "height": 32, "width": 32}
    return np.asarray(pipeline("flux")(**arguments, generator=torch.Generator().manual_seed(seed)).images[0])


def test_a_visitor_sees_both_pictures_and_every_step(visitor):
    """The images keep every bit; the timelines have a column per step; another target does not change the plain one."""
    client = visitor()
    pages = shown(begin(client))
    last = pages[-1]
    assert last["status"].startswith("Done: balanced, target_error 0.9.")
    assert re.search(r"Denoising \*\*\d+\.\d\d×\*\* as fast, PSNR \d+\.\d dB, \d+% computed\.", last["status"])
    plain, fast = (np.asarray(Image.open(path)) for path in last["beside"]["value"])
    np.testing.assert_array_equal(plain, expected("a red fox"))
    assert fast.shape == plain.shape and (fast != plain).any()
    assert re.search(r"\| denoising( \| \d+\.\d\d){3}× \|", last["figures"]) and "\nDecoded by " in last["figures"]
    columns = [page["steps"].count("<title>") for page in pages]
    assert columns == sorted(columns) and columns[-1] == 2 * STEPS
    plain_steps, _, fast_steps = last["steps"].partition("Accelerated")
    assert "forecast</span>" not in plain_steps and "forecast</span>" in fast_steps
    assert last["preview"] == {**last["preview"], "visible": False}

    again = shown(begin(client, target=0.01))[-1]
    assert "| plain (cached) |" in again["figures"]
    np.testing.assert_array_equal(np.asarray(Image.open(again["beside"]["value"][0])), plain)
    captions = [each["caption"] for each in again["gallery"]["value"]]
    assert ["target_error 0.01" in caption for caption in captions] == [True, False]


def test_a_visitor_can_cancel(visitor, site):
    """The run ends between steps, and the next one is whole."""
    client = visitor()
    job = begin(client, steps=200, seed=5)
    until(lambda: any("step" in values[0] for values in job.outputs()))
    job.cancel()
    assert shown(begin(client, seed=5))[-1]["status"].startswith("Done")
    assert not any(values[0].startswith("Done") for values in job.outputs()) and not site.playground._runs


def test_videos_come_in_one_file_and_a_frame(visitor):
    """Both play in step, and the middle frames are compared."""
    pytest.importorskip("imageio_ffmpeg")
    last = shown(begin(visitor(), "a whale", model="wan", frames=5, steps=4))[-1]
    assert last["status"].startswith("Done: video-balanced")
    assert last["clip"]["visible"] and last["clip"]["value"].endswith(".mp4")
    assert Image.open(last["beside"]["value"][0]).size == (32, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": " "}, "Prompt: must have 1 to 2,000 characters here, got 0"),
        ({"steps": 500}, "Steps: must be 1 to 200 here, got 500"),
        ({"frames": 5}, "Frames: FluxPipeline takes no num_frames"),
        ({"model": "/etc"}, "Value: /etc is not in the list of choices"),
    ],
    ids=["prompt", "steps", "no-video", "model"],
)
def test_a_visitor_is_told_in_one_line_what_can_not_be(visitor, changes, message):
    from gradio_client.exceptions import AppError

    job = begin(visitor(), **changes)
    with pytest.raises(AppError) as failure:
        job.result(timeout=60)
    assert message in str(failure.value) and "\n" not in str(failure.value)
    assert [values[0] for values in job.outputs()][-1:] == ([] if "model" in changes else [f"**Failed.** {message}"])


def streamed(site, steps):
    """The events of a run that no client of gradio's asks for."""
    call = f"{site.url}gradio_api/call/make"
    fields = json.dumps({"data": ["a star", "flux", "balanced", False, 0.9, 0, steps, 32, 32, None]}).encode()
    with urllib.request.urlopen(urllib.request.Request(call, fields, {"Content-Type": "application/json"})) as answer:
        return urllib.request.urlopen(f"{call}/{json.load(answer)['event_id']}")


def test_the_server_asks_nobody_else(site, asked):
    """No telemetry and no look for a newer version, when it starts and while it runs; gradio's client has some."""
    asked.clear()
    with streamed(site, STEPS) as events:
        assert b"Done: balanced" in events.read()
    assert set(asked) | site.asked_at_start == {"127.0.0.1"}


def test_a_visitor_who_leaves_ends_the_run(site):
    """The run of a stream whose reader has gone stops between steps."""
    with streamed(site, 200) as events:
        until(lambda: b"of 200" in events.readline())
    until(lambda: not site.playground._runs)
    assert ("steps", 200) not in [setting for key in site.playground._plain for setting in key]


@pytest.fixture
def browser():
    """Chromium without a window, where Debian's package and playwright are installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed: apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def tab(browser, site, width=1280):
    """The page in a window of this width, and all addresses that it asks."""
    page = browser.new_page(viewport={"width": width, "height": 844})
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(site.url)
    page.wait_for_selector("text=Generate both")
    return page, asked


def fill(page, **values):
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(str(value))


def test_a_browser_shows_both_images_and_asks_nobody_else(site, browser):
    """The slider makes another image, and no request leaves the machine."""
    page, asked = tab(browser, site)
    fill(page, Prompt="a red star", Steps=STEPS, Height=32, Width=32)
    page.get_by_role("button", name="Generate both").click()
    page.wait_for_selector("text=Done: balanced")
    until(lambda: page.locator("img").count() >= 3)  # both sides, and the accelerated one in the history
    page.get_by_role("slider").first.press("End")
    page.get_by_role("slider").first.dispatch_event("pointerup")
    page.wait_for_selector("text=target_error 1.")
    assert not page.get_by_label("The preset's own target_error").is_checked()
    assert [url for url in asked if not url.startswith((site.url, "data:", "blob:"))] == []
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_results_are_in_view_without_scrolling(site, browser, width):
    """Nothing is wider than the window, and the result is above the settings on a phone."""
    page, _ = tab(browser, site, width)
    page.locator("#examples button").nth(1).click()
    assert page.get_by_label("Prompt", exact=True).input_value() == page.locator("#examples button").nth(1).inner_text()
    fill(page, Steps=STEPS, Height=32, Width=32)
    page.evaluate("scrollTo(0, 0)")
    page.get_by_role("button", name="Generate both").click()
    page.wait_for_selector("text=Done: balanced")
    image = page.locator("#results img").first
    until(lambda: image.is_visible())
    box = image.bounding_box()
    assert box["y"] + min(box["height"], 200) <= 844
    settings = page.locator("#settings").bounding_box()
    assert settings["y"] > box["y"] or settings["x"] + settings["width"] < box["x"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("key", ["Enter", "Tab"])
def test_typing_a_presets_name_selects_it(site, browser, key):
    """Also where other names contain it; the slider then shows its target. Tab alone changes nothing and goes on."""
    page, _ = tab(browser, site)
    box = page.get_by_role("combobox", name="Preset")
    box.focus()
    page.keyboard.press("Tab")
    page.get_by_role("option").first.wait_for(state="detached")
    assert box.input_value() == "Balanced"
    box.click()
    box.press("Control+a")
    page.keyboard.type("quality")
    page.get_by_role("option", name="Nearly identical").wait_for()
    page.keyboard.press(key)
    until(lambda: page.get_by_role("slider").first.input_value() == "0.07")
    assert box.input_value() == "Nearly identical (quality)"
    if key == "Tab":
        assert page.evaluate("document.activeElement.type") == "checkbox"


def test_a_taken_port_is_told_in_one_line(run, site, tmp_path):
    port = site.url.rsplit(":", 1)[1].rstrip("/")
    pipeline("flux").save_pretrained(tmp_path / "flux")
    result = run("app", "--model", tmp_path / "flux", "--port", port)
    assert result.exit_code == 2
    assert result.stderr == f"error: --port: can't listen on 127.0.0.1:{port}; give another --host or --port\n"
