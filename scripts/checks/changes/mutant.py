"""One change of the code, a row of the tables."""

from dataclasses import dataclass

Row = tuple[str, str, str, str, str]  # name, property that breaks, nearest test files, old text, new text


@dataclass(frozen=True)
class Mutant:
    """Change of one place in the code: `old`, which occurs once in `file`, becomes `new`.

    `breaks`: property that no longer holds; `tests`: nearest test files, separated by spaces.
    """

    name: str
    file: str
    breaks: str
    tests: str
    old: str
    new: str

    def of(self, source: str) -> str:
        """Return the changed source; raises ValueError if the old text does not occur exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: old text must occur once in {self.file}, got {count} times: {self.old!r}")
        return source.replace(self.old, self.new)


def table(files: dict[str, list[Row]]) -> list[Mutant]:
    """Return the changes of rows by file."""
    return [Mutant(name, file, *row) for file, rows in files.items() for name, *row in rows]
