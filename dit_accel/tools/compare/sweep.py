"""A comparison as it grows: rows in a JSON file, one a method, written as each is measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit_accel.errors import ComparisonError
from dit_accel.tools.compare.methods import Method
from dit_accel.tools.compare.report import approximations, figures, frontier_table, margins, table
from dit_accel.tools.compare.runs import Bench
from dit_accel.tools.files import difference_of, write_whole


class Sweep:
    """Rows of a comparison, in a file that an interrupted sweep goes on from.

    Args:
        stem: of the files: ``STEM.json``, and what :meth:`publish` writes beside it.
        settings: what all rows have in common, JSON values; a file of others is refused.

    Raises:
        ComparisonError: the file holds a comparison with other settings, or none.
    """

    def __init__(self, stem: Path, settings: dict[str, Any]) -> None:
        self._file = stem.with_name(f"{stem.name}.json")
        self.document: dict[str, Any] = {"settings": settings, "origin": {}, "plain": {}, "left_out": {}, "results": []}
        if self._file.is_file():
            self.document |= _read(self._file, settings)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.document["results"]

    def describe(self, bench: Bench, origin: dict[str, Any], left_out: dict[str, str], retime: bool = False) -> None:
        """Says what this process measures with, on what, and whom it leaves out.

        Seconds of the plain run stay those that the rows of the file were timed beside, on the same device and unless
        ``retime``.
        """
        moved = self.document["origin"].get("device") != origin.get("device")
        known = None if retime or moved else self.document["plain"].get("seconds")
        seconds = bench.time_plain() if known is None else known
        plain = {"seconds": seconds, "repeats": bench.repeatable, "lpips": bench.lpips}
        self.document |= {"origin": origin, "plain": plain, "left_out": left_out}
        self._save()

    def missing(self, methods: Sequence[Method], again: Sequence[str] = ()) -> list[Method]:
        """Methods without figures, those whose preset was another then, and those that are named."""
        known = {(row["name"], row.get("digest", "")) for row in self.rows if "error" not in row}
        return [method for method in methods if method.name in again or (method.name, method.digest) not in known]

    def add(self, row: dict[str, Any]) -> None:
        """Puts a row in the place of the one of its name, or behind all others."""
        places = {known["name"]: place for place, known in enumerate(self.rows)}
        place = places.get(row["name"], len(self.rows))
        self.rows[place : place + 1] = [row]
        self._save()

    def merge(self, other: Path, order: Sequence[str]) -> None:
        """Takes in the rows of another file of the same settings; rows then stand in that order of their names.

        Seconds of the plain run stay, where they are known.

        Raises:
            ComparisonError: the other file holds a comparison with other settings.
        """
        found = _read(other, self.document["settings"])
        rows = {row["name"]: row for row in (*self.rows, *found["results"])}
        places = {name: place for place, name in enumerate(order)}
        known = self.document["plain"].get("seconds")
        plain = found["plain"] | ({} if known is None else {"seconds": known})
        self.document |= {"origin": found["origin"], "plain": plain, "left_out": found["left_out"]}
        self.document["results"] = sorted(rows.values(), key=lambda row: places.get(row["name"], len(places)))
        self._save()

    def publish(self) -> list[Path]:
        """Writes the tables and plots beside the JSON file, whose margins it brings up to date; all paths."""
        self.document["margins"] = margins(self.rows)
        self.document["frontiers"] = frontier_table(self.rows)
        self._save()
        markdown = self._file.with_suffix(".md")
        write_whole(markdown, table(self.document) + "\n")
        drawn = figures(self.document, self._file.with_suffix(".png")) if approximations(self.rows) else []
        return [self._file, markdown, *drawn]

    def _save(self) -> None:
        write_whole(self._file, json.dumps(self.document, indent=1) + "\n")


def _read(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        difference = difference_of(document["settings"], settings)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ComparisonError(f"{file} holds no comparison: name another output, or remove the file") from None
    if difference is not None:
        raise ComparisonError(
            f"{file} holds a comparison that differs in {difference}: ask for the same again to go on, name another "
            "output, or remove the file"
        )
    return document
