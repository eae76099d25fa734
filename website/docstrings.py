"""A griffe extension: docstrings of the package as Markdown.

Docstrings list arguments as lines ``name: text``, with further lines indented. The site shows each
as an item of a list.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): (.*)$")
TITLE = re.compile(r"^-{3,}$")


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    rows = text.splitlines()
    lines: list[str] = []
    in_list = False
    for i, line in enumerate(rows):
        following = rows[i + 1] if i + 1 < len(rows) else ""
        if TITLE.match(line):
            continue
        if TITLE.match(following):
            lines += ["", f"**{line.strip()}**", ""]
        elif match := ARGUMENT.match(line):
            if not in_list and lines and lines[-1]:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            lines.append(f"- {names}: {match[2]}")
            in_list = True
            continue
        else:
            lines.append(line)
        in_list = in_list and line.startswith(" ")
    return "\n".join(lines)


class Markdown(griffe.Extension):
    """Convert every docstring before it is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
