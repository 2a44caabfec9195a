"""A comparison as a report that others can check: sealed with digests of its files, figures held against its images."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image

from dit_accel.presets.loading import LEVELS
from dit_accel.tools.files import write_whole
from dit_accel.tools.measure.metrics import IDENTICAL, psnr
from dit_accel.tools.measure.repeats import speedup_of

SCHEMA = "dit-accel report 1"
STEM = "report"
PLAIN = "plain"  # in names of images, where other rows have their setting
PEERS = "first-block-cache,dbcache,taylorseer-lite,meancache,fewer-steps"
RUNS = 6  # of a prompt, in plain runs' time: the plain run, presets and other methods, with plain steps after each
FEWEST, MOST = 2, 8  # prompts
TOLERANCE = 0.25  # share of the squared error; images have 8 bits, and PSNR was measured before they were rounded
ROUNDING = 4 / 12 / 255**2  # squared error that rounding two images to 8 bits may add or hide


def prompts_within(
    minutes: float, pipe: Any, arguments: dict, prompts: Sequence[str], stem: Path, plain_steps: int | None
) -> list[str]:
    """Return as many prompts as a comparison takes in this time, or those of the one that it goes on with."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(stem.with_name(f"{stem.name}.json").read_text(encoding="utf-8"))["settings"]["prompts"]
    from dit_accel.tools.measure.timing import denoise, transformer_clock

    pipe.set_progress_bar_config(disable=True)
    for _ in range(2):
        with transformer_clock(pipe) as clock:
            denoise(pipe, {**arguments, "prompt": prompts[0]}, 0, plain_steps)
    steps = arguments.get("num_inference_steps") or signature(pipe.__call__).parameters["num_inference_steps"].default
    plain = clock.seconds * steps / plain_steps if plain_steps else 2 * clock.seconds  # a plain run after each run
    return list(prompts[: min(max(int(60 * minutes / (RUNS * plain)), FEWEST), MOST)])


def seal(folder: Path) -> None:
    """Add the schema and the digests of all files to the comparison in a report's folder."""
    file = folder / f"{STEM}.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    images = sorted(folder.glob(f"{STEM}-images/*.png"))
    files = {path.relative_to(folder).as_posix(): _digest(path.read_bytes()) for path in images}
    document |= {"schema": SCHEMA, "files": files}
    write_whole(file, json.dumps(document | {"digest": _digest_of(document)}, indent=1) + "\n")


def problems(folder: Path) -> list[str]:
    """Return what is missing from a report's folder, or was changed in it; empty = the report is whole.

    A digest shows damage and careless edits. If it was computed anew, PSNR of the images shows forged figures.
    """
    try:
        document = json.loads((folder / f"{STEM}.json").read_text(encoding="utf-8"))
        if "digest" not in document:
            return [f"{STEM}.json is not finished: the command that began it goes on"]
        if document["schema"] != SCHEMA:
            return [f"schema is {document['schema']!r}; this version checks {SCHEMA!r}"]
        if document["digest"] != _digest_of(document):
            return [f"{STEM}.json was changed after it was written: run the report again"]
        files = {folder / name: digest for name, digest in document["files"].items()}
        whole = {path for path, digest in files.items() if path.is_file() and _digest(path.read_bytes()) == digest}
        lost = [f"{path.name} is missing or was changed" for path in files if path not in whole]
        return lost or list(_in_rows(folder, document))
    except OSError as error:
        return [f"can't be read: {error}"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{STEM}.json is no report: {type(error).__name__}: {error}"]


def row(file: Path) -> str:
    """Return a report's row in the table of docs/guide/comparing.md, from its JSON file."""
    document = json.loads(file.read_text(encoding="utf-8"))
    ours = [row for row in document["results"] if row["name"].removeprefix("video-") in LEVELS]
    cells = [f"{speedup_of(row).median:.2f}×, {row['psnr_db']:.1f}, {min(row['psnr_db_each']):.1f}" for row in ours]
    settings, device = document["settings"], document["origin"]["device"]
    device += "".join(f", {key} {settings[key]}" for key in ("offload", "quantize") if key in settings)
    return f"| {' | '.join((settings['model'], device, *cells))} |"


def _in_rows(folder: Path, document: dict[str, Any]) -> Iterator[str]:
    rows = document["results"]
    for key in ("device", "torch", "diffusers", "commit"):
        if not document["origin"].get(key):
            yield f"{key} of the run is missing"
    for level in LEVELS:
        if not any(row["name"].removeprefix("video-") == level and "error" not in row for row in rows):
            yield f"preset {level} was not measured"
    for row in rows:
        if "error" not in row:
            yield from (f"{row['name']}: {problem}" for problem in _in_row(folder, row, document))


def _in_row(folder: Path, row: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    prompts, levels = document["settings"]["prompts"], row["psnr_db_each"]
    if not len(levels) == len(row["call_seconds_each"]) == len(prompts):
        yield f"figures of {len(levels)} of {len(prompts)} prompts"
        return
    if not math.isclose(fmean(levels), row["psnr_db"], abs_tol=1e-6):
        yield "psnr_db is not the mean of psnr_db_each"
    times = [*row["call_seconds_each"], *row["seconds_each"], row["computed_fraction"]]
    if not all(0 < value < math.inf for value in times):
        yield "times and the computed fraction must be positive"
    if document["plain"]["frames"] == 1:  # images of videos show one frame
        for prompt, decibels in enumerate(levels):
            paths = [folder / f"{STEM}-images" / image_name(name, prompt) for name in (PLAIN, row["name"])]
            with Image.open(paths[0]) as plain, Image.open(paths[1]) as image:
                found = min(psnr(image, plain), IDENTICAL)
            errors = [10 ** (-value / 10) for value in (decibels, found)]  # mean squares
            if abs(errors[0] - errors[1]) > TOLERANCE * max(errors) + ROUNDING:
                yield f"PSNR of prompt {prompt} is {decibels:.1f} dB, of its image {found:.1f} dB"


def image_name(setting: str, prompt: int) -> str:
    """Return the file name of the image of a setting or `PLAIN`."""
    return f"{prompt:03d}-{re.sub(r'[^A-Za-z0-9.=-]+', '-', setting)}.png"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of(document: dict[str, Any]) -> str:
    """Return the digest of a report without its own."""
    values = {key: value for key, value in document.items() if key != "digest"}
    return _digest(json.dumps(values, sort_keys=True).encode())
