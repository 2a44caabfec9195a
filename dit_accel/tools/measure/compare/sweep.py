"""A comparison in progress: a JSON file with one row per method, saved after each measurement."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dit_accel.errors import ComparisonError
from dit_accel.tools.files import read_results, write_whole
from dit_accel.tools.measure.compare.methods import Method
from dit_accel.tools.measure.compare.report import approximations, figures, frontier_table, margins, table
from dit_accel.tools.measure.compare.runs import Bench

read = partial(read_results, key="settings", kind="comparison", remove="the file", error=ComparisonError)


class Sweep:
    """Rows of a comparison, in ``STEM.json``, from which an interrupted sweep with the same settings resumes."""

    def __init__(self, stem: Path, settings: dict[str, Any]) -> None:
        self._file = stem.with_name(f"{stem.name}.json")
        self.document: dict[str, Any] = {"settings": settings, "origin": {}, "plain": {}, "left_out": {}, "results": []}
        if self._file.is_file():
            self.document |= read(self._file, settings)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.document["results"]

    def describe(self, bench: Bench, origin: dict[str, Any], left_out: dict[str, str]) -> None:
        plain = {"repeats": bench.repeatable, "seconds_of_call": bench.call_seconds, "frames": bench.frames}
        plain |= bench.unavailable
        self.document |= {"origin": origin, "plain": plain, "left_out": left_out}
        self._save()

    def missing(self, methods: Sequence[Method], again: Sequence[str] = ()) -> list[Method]:
        """Return methods without results, methods with a changed preset, and methods named in ``again``."""
        known = {(row["name"], row.get("digest", "")) for row in self.rows if "error" not in row}
        return [method for method in methods if method.name in again or (method.name, method.digest) not in known]

    def add(self, row: dict[str, Any]) -> None:
        place = {known["name"]: place for place, known in enumerate(self.rows)}.get(row["name"], len(self.rows))
        self.rows[place : place + 1] = [row]
        self._save()

    def merge(self, other: Path, order: Sequence[str]) -> None:
        """Merge the rows of another file with the same settings, and sort all rows by ``order``, a list of names."""
        found = read(other, self.document["settings"])
        rows = {row["name"]: row for row in (*self.rows, *found["results"])}
        places = {name: place for place, name in enumerate(order)}
        self.document |= {key: found[key] for key in ("origin", "plain", "left_out")}
        self.document["results"] = sorted(rows.values(), key=lambda row: places.get(row["name"], len(places)))
        self._save()

    def publish(self) -> list[Path]:
        """Update the margins in the JSON file, and write tables and plots to its folder; return all paths."""
        self.document["margins"] = margins(self.rows)
        self.document["frontiers"] = frontier_table(self.rows)
        self._save()
        markdown = self._file.with_suffix(".md")
        write_whole(markdown, table(self.document) + "\n")
        plots = figures(self.document, self._file.with_suffix(".png")) if approximations(self.rows) else []
        return [self._file, markdown, *plots]

    def _save(self) -> None:
        write_whole(self._file, json.dumps(self.document, indent=1) + "\n")
