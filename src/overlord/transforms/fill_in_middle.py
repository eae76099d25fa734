"""Fill in the middle: documents cut into three parts of characters, rearranged before their ids.

The parts are cut as in Bavarian et al. (2022) and StarCoder: at two uniform positions between the
characters of the whole document, before tokenization. A model that trains on cuts between tokens
alone fails where an editor's cursor is inside a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from overlord.errors import TransformError
from overlord.hashing import U64, digest, keyed_hash, mix64
from overlord.sample import Ragged
from overlord.transforms.base import Transform, refuse
from overlord.transforms.tokenize import Encoder, Tokenize, token_of

MARKS = ("prefix", "suffix", "middle")


@dataclass(frozen=True, slots=True, repr=False)
class FillInMiddle:
    """Rearrange documents, so that a model learns to fill a gap. Put it directly before Tokenize.

    A fraction ``rate`` of the documents becomes ``prefix A suffix C middle B`` (PSM), where A, B
    and C are the parts of the text in order. Of these, a fraction ``spm_rate`` becomes
    ``prefix suffix C middle A B`` (SPM). The marks are tokens of the tokenizer or ids. ``bos`` and
    ``eos`` of Tokenize enclose the whole. A document that is then longer than the limit of
    ``on_long`` stays as it was, since a piece without its marks would be a broken example.
    """

    rate: float = 0.5
    spm_rate: float = 0.5
    prefix: str | int = field(default="<fim_prefix>", kw_only=True)
    suffix: str | int = field(default="<fim_suffix>", kw_only=True)
    middle: str | int = field(default="<fim_middle>", kw_only=True)
    kind: ClassVar[str] = "fill_in_middle"
    user_code: ClassVar[bool] = False
    holds_lock: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = []
        for name in ("rate", "spm_rate"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and 0 <= value <= 1):
                problems.append(f"{name}: expected a number from 0 to 1, got {value!r}")
        for name in MARKS:
            token = getattr(self, name)
            plain = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31
            if not (plain or (isinstance(token, str) and token)):
                problems.append(
                    f"{name}: expected a token or an id from 0 to 2**31 - 1, got {token!r}"
                )
        refuse("FillInMiddle", problems)

    def __repr__(self) -> str:
        marks = ", ".join(f"{name}={getattr(self, name)!r}" for name in MARKS)
        return f"FillInMiddle({self.rate!r}, {self.spm_rate!r}, {marks})"

    def fingerprint(self) -> str:
        options = (float(self.rate), float(self.spm_rate), *(getattr(self, m) for m in MARKS))
        return digest("fill_in_middle", *(repr(option) for option in options))


def check_order(source: str, transforms: Sequence[Transform]) -> None:
    """Raise TransformError for a FillInMiddle that is not directly before the Tokenize."""
    for position, t in enumerate(transforms):
        if not isinstance(t, FillInMiddle):
            continue
        follower = transforms[position + 1] if position + 1 < len(transforms) else None
        if not isinstance(follower, Tokenize):
            raise TransformError(
                source,
                repr(t),
                f"expected Tokenize directly after it, got {follower!r}",
                "put FillInMiddle directly before Tokenize; it cuts text, not ids of a column",
            )
        if follower.add_special_tokens:
            raise TransformError(
                source,
                repr(follower),
                "expected add_special_tokens=False after FillInMiddle, got True",
                "set bos and eos: a template would be applied to every part",
            )


@dataclass(frozen=True, slots=True, eq=False)
class FillInMiddleEncoder:
    """An encoder that rearranges documents, with the ids of the marks."""

    spec: FillInMiddle
    encoder: Encoder
    marks: tuple[int, int, int]
    limit: int  # most tokens of a rearranged document
    dtype: np.dtype

    def encode(self, texts: list[str], keys: np.ndarray) -> Ragged:
        """Return the ids of every text; ``keys`` has one random uint64 per text."""
        chosen, spm, where = _draws(self.spec, keys, np.array([len(t) for t in texts], np.int64))
        rows = np.flatnonzero(chosen)
        whole = self.encoder.encode(texts)
        ids = Ragged(whole.values.astype(self.dtype, copy=False), whole.offsets)
        if not len(rows):
            return ids
        # The three parts of each chosen text, in one call.
        parts = []
        for i in rows.tolist():
            low, high = where[i].tolist()
            parts += [texts[i][:low], texts[i][low:high], texts[i][high:]]
        plain = self.encoder.without_ends().encode(parts)
        made = dict(self._arranged(plain, rows.tolist(), spm))
        out = [made.get(i, ids[i]) for i in range(len(texts))]
        offsets = np.zeros(len(out) + 1, np.int64)
        np.cumsum([len(row) for row in out], out=offsets[1:])
        return Ragged(np.concatenate(out), offsets)

    def _arranged(
        self, parts: Ragged, rows: list[int], spm: np.ndarray
    ) -> list[tuple[int, np.ndarray]]:
        """Return (row, ids) of the rows whose rearranged document is within the limit."""
        prefix, suffix, middle = (np.array([mark], self.dtype) for mark in self.marks)
        before, after = (
            np.array([] if token is None else [token], self.dtype)
            for token in (self.encoder.bos, self.encoder.eos)
        )
        made = []
        for k, row in enumerate(rows):
            a, b, c = (parts[3 * k + n].astype(self.dtype, copy=False) for n in range(3))
            inner = (
                (prefix, suffix, c, middle, a, b) if spm[row] else (prefix, a, suffix, c, middle, b)
            )
            ids = np.concatenate((before, *inner, after))
            if len(ids) <= self.limit:
                made.append((row, ids))
        return made


def build_fill_in_middle(
    spec: FillInMiddle, tokenize: Tokenize, encoder: Encoder, limit: int, source: str
) -> FillInMiddleEncoder:
    """Return the encoder of a FillInMiddle and of the Tokenize after it.

    Raises TransformError for a mark that the vocabulary lacks.
    """
    prefix, suffix, middle = (
        token_of(encoder.tokenizer, getattr(spec, name), repr(spec), name, tokenize, source)
        for name in MARKS
    )
    highest = np.min_scalar_type(max(prefix, suffix, middle))
    return FillInMiddleEncoder(
        spec, encoder, (prefix, suffix, middle), limit, np.promote_types(encoder.dtype, highest)
    )


def keys_of(key: int, epoch: int, file: int, rows: np.ndarray) -> np.ndarray:
    """Return the random key of each row, from its identity alone, as int64."""
    return keyed_hash(key, epoch, file, rows).view(np.int64)


def _draws(
    spec: FillInMiddle, keys: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each text: rearranged or not, SPM or not, and the two cuts in ascending order."""
    numbers = [_fraction(mix64(keys ^ U64(n + 1))) for n in range(4)]
    cuts = np.stack(
        [np.minimum((u * (lengths + 1)).astype(np.int64), lengths) for u in numbers[2:]]
    )
    # An empty document stays empty, and is quarantined like any other.
    return (
        (numbers[0] < spec.rate) & (lengths > 0),
        numbers[1] < spec.spm_rate,
        np.sort(cuts, axis=0).T,
    )


def _fraction(bits: np.ndarray) -> np.ndarray:
    """Return uint64 as numbers in [0, 1) of 53 bits."""
    return (bits >> U64(11)).astype(np.float64) * 2.0**-53
