"""YAML of job files: plain scalars as in YAML 1.2, duplicate keys, and values as text."""

from __future__ import annotations

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """A safe loader that records duplicate keys and reads plain scalars as in YAML 1.2.

    ``1e-3`` is a number. ``no``, ``on`` and ``2024-01-01`` are text.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []  # problems of keys that are given twice

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    self.duplicates.append(
                        f"{key.value}: expected it once, got it twice, the second time in line "
                        f"{key.start_mark.line + 1}"
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """A safe dumper that quotes texts which ``Loader`` would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_SCALARS = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$",
        "-+.0123456789",
    ),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("merge", r"^<<$", "<"),
)
for _cls in (Loader, Dumper):
    _cls.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _SCALARS:
        _letters = ["" if letter == "\0" else letter for letter in _first]
        _cls.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _letters)


def short_repr(value: Any) -> str:
    """Return the repr of a value for an error, cut to 80 characters; "nothing" for None."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
