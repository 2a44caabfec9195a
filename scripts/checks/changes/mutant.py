"""One change of the code, as a line of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one place in the code.

    Args:
        name: for ``--only`` and the table.
        file: path from the checkout's root.
        old: text that occurs there exactly once.
        new: text in its place.
        breaks: the property that no longer holds.
        tests: nearest test files, separated by spaces, as pytest takes them.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str

    def of(self, source: str) -> str:
        """The changed source.

        Raises:
            ValueError: the old text is not there exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: the old text must occur once in {self.file}, got {count} times: {self.old!r}"
            )
        return source.replace(self.old, self.new)
