"""JSON of reports: one document, or one line of a stream of documents."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return a value as plain JSON values.

    Numbers that JSON lacks (NaN, infinity) become null, bytes their length, sets sorted lists.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value) if isinstance(value, Path) else repr(value)


def json_document(value: Any) -> str:
    """Return a value as one JSON document of several lines, in ASCII."""
    return json.dumps(plain(value), indent=1, allow_nan=False)


def json_line(value: Any) -> str:
    """Return a value as JSON on one line, in ASCII."""
    return json.dumps(plain(value), allow_nan=False)
