"""The file formats of the demo corpus, which depend on the installed optional packages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from zlib import crc32

from overlord.checks import pip_install
from overlord.demo.texts import Kind

IDS = "tokens"  # the column of token ids, if there is no tokenizer
_PIECES = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class DemoFormats:
    """The choice of formats; a field is true if the optional package of its name is installed."""

    tokenizers: bool
    zstandard: bool

    @classmethod
    def installed(cls) -> DemoFormats:
        """Return the choice for the packages that are installed here."""
        return cls(find_spec("tokenizers") is not None, find_spec("zstandard") is not None)

    def format(self, kind: Kind) -> str:
        """Return the file format of a kind of text.

        Without tokenizers, parquet replaces tar, which cannot hold ids. Without zstandard, `.gz`
        replaces `.zst`.
        """
        if kind.format == "tar" and not self.tokenizers:
            return "parquet"
        return "jsonl.gz" if kind.format == "jsonl.zst" and not self.zstandard else kind.format

    def column(self, kind: Kind) -> str:
        """Return the name of the column with the texts, or without tokenizers with token ids."""
        return kind.column if self.tokenizers else IDS

    @property
    def note(self) -> str:
        """A sentence about the effect of missing packages; empty if none is missing."""
        effects = {
            "tokenizers": ""
            if self.tokenizers
            else "a hash maps words to ids instead of a trained tokenizer",
            "zstandard": "" if self.zstandard else "one source is .gz instead of .zst",
        }
        missing = [f"without {name} {effect}" for name, effect in effects.items() if effect]
        return f"{'; '.join(missing)}: {pip_install('text', 'zstd')} adds both" if missing else ""


def word_ids(text: str, vocab: int) -> list[int]:
    """Return token ids of a text: a hash from 1 to ``vocab - 1`` per word or symbol, then 0."""
    return [1 + crc32(piece.encode()) % (vocab - 1) for piece in _PIECES.findall(text)] + [0]
