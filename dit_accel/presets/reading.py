"""Read untrusted files and YAML within bounds on size, depth and number of values."""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dit_accel.errors import PresetError, shortened

LONGEST_FILE = 2**16  # bytes of YAML; a preset tuned block by block has 10,000
LONGEST_VALUE = 1_000  # characters
MOST_LEVELS = 20  # nested lists and mappings
MOST_VALUES = 5_000  # keys included
_STRINGS = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge")


def read_text(path: Path, most: int = LONGEST_FILE) -> str:
    """Return the text of a UTF-8 file; more than ``most`` bytes, other encodings and odd names are a ValueError."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content.decode("utf-8")


def read_yaml(text: str) -> Any:
    """Return plain values from YAML, dates as strings. Aliases and merges are written out, and count as copies.

    Invalid YAML, a key that occurs twice, and values beyond a bound are a PresetError.
    """
    try:
        return _Copy().of(_loaded(text))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise PresetError(f"not valid YAML: {shortened(str(error.problem))}{line}") from None
    except RecursionError:
        raise PresetError(f"not valid YAML: more than {MOST_LEVELS} nested levels") from None
    except (yaml.YAMLError, ValueError) as error:
        raise PresetError(f"not valid YAML: {shortened(' '.join(str(error).split()))}") from None


@lru_cache(maxsize=64)
def _loaded(text: str) -> Any:
    """Return values of YAML; parsing a preset takes 10 ms, and presets share their bases."""
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """Keeps dates and merge keys as strings, and refuses long values and a key that occurs twice."""

    yaml_implicit_resolvers: ClassVar = {
        first: [rule for rule in rules if rule[0] not in _STRINGS]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if len(node.value) > LONGEST_VALUE:
            problem = f"a value has {len(node.value):,} characters, of {LONGEST_VALUE:,} at most"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge nothing: a few nested merges would take all memory; ``_Copy`` counts what it merges."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and keys[key.value] > 1:
                problem = f"key {shortened(key.value)!r} occurs twice in one mapping"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)


class _Copy:
    """A copy of YAML's values with aliases and merges written out, within the bounds."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def of(self, value: Any, level: int = 1) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {MOST_VALUES:,} values, aliases written out")
        if level > MOST_LEVELS:
            raise ValueError(f"more than {MOST_LEVELS} nested levels, aliases written out")
        if isinstance(value, list):
            return [self.of(item, level + 1) for item in value]
        if not isinstance(value, dict):
            if value is not None and not isinstance(value, (str, int, float)):
                raise ValueError(f"tags are not allowed, got a {type(value).__name__}")
            return value
        self._left -= len(value)
        copied = {key: self.of(item, level + 1) for key, item in value.items()}
        merged = copied.pop("<<", [])
        for mapping in reversed(merged if isinstance(merged, list) else [merged]):
            if not isinstance(mapping, dict):
                raise ValueError(f"<< must name mappings, got {type(mapping).__name__}")
            copied = mapping | copied
        return copied
