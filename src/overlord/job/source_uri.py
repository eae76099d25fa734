"""Problems of what a source is read from: files, a dataset or a factory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from os import PathLike
from typing import Any

from overlord.uris import uri_problems


def problems(at: str, uri: Any) -> list[str]:
    """Return every problem of the ``uri`` of the source ``at``, each as one text."""
    if isinstance(uri, (list, tuple)):
        if not uri:
            return [f"{at}.uri: expected at least one file, got an empty list"]
        if secret := [problem for p in uri if isinstance(p, str) for problem in uri_problems(p)]:
            return [f"{at}.uri: {problem}" for problem in secret]
        wrong = [p for p in uri if not isinstance(p, (str, PathLike)) or not str(p)]
        if wrong:
            return [
                f"{at}.uri: expected a list of paths, got {wrong[0]!r} in it; use "
                "Source.from_dataset for a list of rows"
            ]
        counts = Counter(str(p) for p in uri)
        return [
            f"{at}.uri: expected every file once, got {p} twice; its rows would be read twice"
            for p in sorted(counts)
            if counts[p] > 1
        ]
    if isinstance(uri, str) and (found := uri_problems(uri)):
        return [f"{at}.uri: {problem}" for problem in found]
    files = isinstance(uri, (str, PathLike)) and bool(str(uri))
    sized = hasattr(uri, "__getitem__") and hasattr(uri, "__len__")
    dataset = sized and not isinstance(uri, (str, bytes, Mapping, type))
    factory = hasattr(uri, "fn") and hasattr(uri, "shards")
    rows = callable(uri) or hasattr(uri, "__iter__")
    return (
        []
        if files or dataset or factory
        else [
            f"{at}.uri: expected files, a dataset or a factory, got {uri!r}"
            + "; use Source.from_factory with a function that returns an iterator of rows" * rows
        ]
    )
