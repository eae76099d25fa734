"""``help()`` on the classes of a job explains every argument."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields

import pytest

import overlord as ov

CLASSES = [ov.Job, ov.Source, ov.Batch, ov.Mesh]


def arguments(cls: type) -> dict[str, str]:
    """Name -> text of every entry of the list of arguments in a class docstring."""
    text = inspect.getdoc(cls) or ""
    _, _, listed = text.partition("Arguments\n---------\n")
    found: dict[str, str] = {}
    for line in listed.split("\n\n")[0].splitlines():
        if entry := re.match(r"(\w+(?:, \w+)*): (.*)", line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_docstring_lists_exactly_the_fields(cls: type) -> None:
    assert sorted(arguments(cls)) == sorted(f.name for f in fields(cls))


@pytest.mark.parametrize(
    ("cls", "field"),
    [(cls, f) for cls in CLASSES for f in fields(cls)],
    ids=lambda value: value.name if isinstance(value, Field) else value.__name__,
)
def test_every_argument_says_whether_it_is_required_or_what_its_default_is(
    cls: type, field: Field[object]
) -> None:
    text = arguments(cls)[field.name]
    missing = field.default is MISSING and field.default_factory is MISSING
    if missing or field.name == "context":
        assert text.endswith("Required.")
        return
    assert "Default" in text
    if isinstance(field.default, (bool, int, float, str)) or field.default is None:
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert f"Default {default}" in text or f"Default: {default}" in text


def test_help_shows_the_docstring() -> None:
    assert "feedback_lag: plan t uses" in inspect.getdoc(ov.Job)
