"""Read untrusted files and YAML within bounds on size, depth and number of values."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dit_accel.errors import PresetError, shortened

LONGEST_FILE = 2**16  # bytes of YAML; a preset tuned block by block has 10,000
MOST_LEVELS = 20  # nested lists and mappings
MOST_VALUES = 5_000  # keys included
LONGEST_VALUE = 1_000  # characters
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


def read_text(path: Path, most: int = LONGEST_FILE) -> str:
    """Return the text of a UTF-8 file of at most ``most`` bytes.

    Raises:
        OSError: the file can't be read.
        ValueError: the file has more bytes or is not UTF-8, or its name has a NUL.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content.decode("utf-8")


def read_yaml(text: str) -> Any:
    """Return plain values from YAML without tags, dates as strings. Aliases are written out, and count as copies.

    Raises:
        PresetError: the text is not valid YAML, has a key twice, or exceeds a bound.
    """
    try:
        return _written_out(_loaded(text))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise PresetError(f"not valid YAML: {shortened(str(error.problem))}{line}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise PresetError(f"not valid YAML: {shortened(' '.join(str(error).split()))}") from None


@lru_cache(maxsize=64)
def _loaded(text: str) -> Any:
    """Return values of YAML; parsing a preset takes 10 ms, and presets share their bases."""
    return yaml.load(text, _Loader)


def _written_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _written_out(each) for key, each in value.items()}
    return [_written_out(each) for each in value] if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar = {
        first: [rule for rule in rules if rule[0] != _TIMESTAMP]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._extents: dict[yaml.Node, tuple[int, int]] = {}  # values and levels of each complete node

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose the next value; check its depth before, and its size afterwards."""
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise _refusal(f"tags such as {shortened(event.tag)} are not allowed", event)
        if self._level == MOST_LEVELS:
            raise _refusal(f"more than {MOST_LEVELS} nested levels", event)
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self._extents:
                raise _refusal(f"alias {shortened(event.anchor)} contains itself", event)
            return node
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_VALUE:
            raise _refusal(f"a value has {len(event.value):,} characters, of {LONGEST_VALUE:,} at most", event)
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
        self._extents[node] = values, levels = self._extent(node)
        if levels > MOST_LEVELS:
            raise _refusal(f"more than {MOST_LEVELS} nested levels, aliases written out", event)
        if values > MOST_VALUES:
            raise _refusal(f"more than {MOST_VALUES:,} values, aliases written out", event)
        return node

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        parts = () if isinstance(node, yaml.ScalarNode) else node.value
        extents = [self._extents[part] for part in (chain(*parts) if isinstance(node, yaml.MappingNode) else parts)]
        values, levels = zip(*extents, strict=True) if extents else ((), (0,))
        return 1 + sum(values), 1 + max(levels)


def _refuse_repeated_keys(mapping: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise _refusal(f"key {shortened(key.value)!r} occurs twice in one mapping", key)
            seen.add(key.value)


def _refusal(problem: str, place: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
