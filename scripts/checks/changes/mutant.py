"""One change of the code, a row of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Change of one place in the code.

    Args:
        name: for ``--only`` and the table.
        file: path from the checkout's root.
        old: text that occurs exactly once in the file.
        new: replacement.
        breaks: property that no longer holds.
        tests: nearest test files, separated by spaces, as for pytest.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str

    def of(self, source: str) -> str:
        """Return the changed source.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: the old text must occur once in {self.file}, got {count} times: {self.old!r}"
            )
        return source.replace(self.old, self.new)
