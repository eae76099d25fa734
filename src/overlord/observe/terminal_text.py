"""Text of data made safe for a terminal: no character of it can control the terminal.

A row, a column name or a file name may contain escape sequences, which could rewrite the screen or
the clipboard. Bidirectional marks could show a text in another order than it is stored.
"""

from __future__ import annotations

import re

# C0 and C1 controls except line break and tab, bidirectional and invisible format characters, line
# separators of Unicode, surrogates, tags. Joiners (200c, 200d) are part of words and emoji.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_BREAKS = re.compile("[\n\t]")


def printable(text: str) -> str:
    """Return a text whose control characters are visible escapes, such as ``\\x1b``."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """Return a printable text in which line breaks and tabs are visible escapes too."""
    return _BREAKS.sub(_escape, printable(text))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if found[0] in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[found[0]]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
