"""The loaded tokenizers of a source's transforms, and their execution on rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from overlord.sample import Ragged
from overlord.sources.tables import is_mixed, numpy_of
from overlord.transforms.base import IDS, Transform
from overlord.transforms.chat import Chat
from overlord.transforms.chat_encoder import ChatEncoder, build_chat_encoder, check_chat_content
from overlord.transforms.columns import (
    HIDDEN,
    Bad,
    RowFrame,
    Unfit,
    column,
    ids_column,
    kind_of,
    read_texts,
)
from overlord.transforms.fill_in_middle import (
    FillInMiddle,
    FillInMiddleEncoder,
    build_fill_in_middle,
    check_order,
)
from overlord.transforms.loss_weights import put_weights
from overlord.transforms.tokenize import Encoder, Tokenize, build_encoder, check_content
from overlord.transforms.user_functions import error_text

# Column of a random key per row, from its identity: made by the slice stage.
KEY = HIDDEN + "\x1ffill_in_middle"


class Encoders:
    """The loaded tokenizers of one source, by the position of their transform."""

    def __init__(self, source: str, transforms: Sequence[Transform], context: int) -> None:
        if any(isinstance(t, FillInMiddle) for t in transforms):
            check_order(source, transforms)
        self._source = source
        self._texts: dict[int, tuple[Tokenize, Encoder]] = {
            i: (t, build_encoder(t, source))
            for i, t in enumerate(transforms)
            if isinstance(t, Tokenize)
        }
        self._chats: dict[int, ChatEncoder] = {
            i: build_chat_encoder(t, source)
            for i, t in enumerate(transforms)
            if isinstance(t, Chat)
        }
        # By the position of the Tokenize after a FillInMiddle.
        self._rearranged: dict[int, FillInMiddleEncoder] = {
            i + 1: build_fill_in_middle(t, after, self._texts[i + 1][1], context, source)
            for i, (t, after) in enumerate(pairwise(transforms))
            if isinstance(t, FillInMiddle) and isinstance(after, Tokenize)
        }
        self.need_keys = bool(self._rearranged)  # whether rows need the column ``KEY``

    @property
    def contents(self) -> dict[int, str]:
        """Digests of the loaded files, by the position of their transform."""
        texts = {i: encoder.content for i, (_, encoder) in self._texts.items()}
        return texts | {i: encoder.content for i, encoder in self._chats.items()}

    @property
    def id_bytes(self) -> int:
        """Bytes of an id: those of the widest tokenizer."""
        kinds = [encoder.dtype for _, encoder in self._texts.values()]
        kinds += [encoder.dtype for encoder in self._chats.values()]
        kinds += [encoder.dtype for encoder in self._rearranged.values()]
        return max(kind.itemsize for kind in kinds)

    def check(self, contents: Mapping[int, str]) -> None:
        """Raise TransformError if a file differs from that of the launch."""
        for i, content in contents.items():
            if i in self._chats:
                check_chat_content(self._chats[i], content, self._source)
            else:
                spec, encoder = self._texts[i]
                check_content(encoder, spec, content, self._source)

    def of(self, position: int) -> Encoder | ChatEncoder | None:
        """Return the encoder of the transform at a position; None if it has no tokenizer."""
        if position in self._chats:
            return self._chats[position]
        return self._texts[position][1] if position in self._texts else None

    def run(self, position: int, frame: RowFrame) -> None:
        """Put token ids into a frame, by the transform at a position. Bad rows are dropped."""
        if position in self._chats:
            _run_chat(frame, self._chats[position])
        else:
            spec, encoder = self._texts[position]
            _tokenize(frame, spec.text, self._rearranged.get(position) or encoder)


def check_messages(table: pa.Table, name: str) -> None:
    """Raise Unfit unless the column may hold lists of messages."""
    kind = kind_of(table, name, "lists of messages")
    lists = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    if not (lists or pt.is_null(kind) or is_mixed(kind)):
        raise Unfit(f"column {name!r}: expected lists of messages, got {kind}")


def check_tools(table: pa.Table, name: str) -> None:
    """Raise Unfit unless the column may hold tools: lists, or JSON text."""
    kind = kind_of(table, name, "tools")
    if not (pt.is_string(kind) or pt.is_large_string(kind)):
        check_messages(table, name)


def _run_chat(frame: RowFrame, encoder: ChatEncoder) -> None:
    spec = encoder.spec
    messages = column(frame.table, spec.messages, "messages").to_pylist()
    tools: list[Any] = [None] * len(messages)
    if isinstance(spec.tools, str):
        tools = column(frame.table, spec.tools, "tools").to_pylist()
    ids, weights, bad = _chats(encoder, messages, tools, None)
    frame.drop({i: f"{spec!r}: {reason}" for i, reason in bad.items()})
    frame.put(IDS, ids_column(ids))
    frame.table = put_weights(frame.table, weights)


def encoded_chats(
    encoder: ChatEncoder, messages: list[Any], tools: list[Any], first: list[int]
) -> tuple[Ragged, Ragged | None, Bad]:
    """Return the ids and loss weights of all conversations, and the reasons of the bad ones.

    A bad one is empty. ``first``: the number of messages that begin each without a loss.
    """
    ids, weights, bad = _chats(encoder, messages, tools, first)
    good = np.array([i not in bad for i in range(len(messages))], bool)
    return _spread(ids, good), None if weights is None else _spread(weights, good), bad


def _spread(column: Ragged, good: np.ndarray) -> Ragged:
    """Return a column with an empty row for each row that is not good."""
    lengths = np.zeros(len(good), np.int64)
    lengths[good] = column.lengths
    return Ragged(column.compact().values, np.concatenate(([0], np.cumsum(lengths))))


def _chats(
    encoder: ChatEncoder, messages: list[Any], tools: list[Any], first: list[int] | None
) -> tuple[Ragged, Ragged | None, Bad]:
    """Return the ids and loss weights of the good conversations, and the reasons of the others."""
    try:
        return encoder.encode(messages, tools, first)
    except BaseException as fault:
        if not _is_row_fault(fault):
            raise
    bad: Bad = {}
    ids, weights = [], []
    for i, (given, row_tools) in enumerate(zip(messages, tools, strict=True)):
        try:
            row_first = None if first is None else [first[i]]
            row_ids, row_weights, row_bad = encoder.encode([given], [row_tools], row_first)
        except BaseException as fault:
            if not _is_row_fault(fault):
                raise
            bad[i] = f"could not be tokenized: {error_text(fault)}"
            continue
        ids.append(row_ids)
        weights += [] if row_weights is None else [row_weights]
        if row_bad:
            bad[i] = row_bad[0]
    return Ragged.concat(ids), Ragged.concat(weights) if encoder.spec.has_weights else None, bad


def encoded_texts(encode: Callable[[list[str]], Ragged], texts: list[str]) -> tuple[Ragged, Bad]:
    """Return the ids of all texts, and the reasons of those that cannot be encoded.

    A text that cannot be encoded has no ids.
    """
    try:
        return encode(texts), {}
    except BaseException as fault:
        if not _is_row_fault(fault):
            raise
    bad: Bad = {}
    parts = []
    for i, text in enumerate(texts):
        try:
            parts.append(encode([text]))
        except BaseException as fault:
            if not _is_row_fault(fault):
                raise
            bad[i] = f"could not be tokenized: {error_text(fault)}"
    good = np.array([i not in bad for i in range(len(texts))], bool)
    return _spread(Ragged.concat(parts), good), bad


def _tokenize(frame: RowFrame, text: str, encoder: Encoder | FillInMiddleEncoder) -> None:
    texts, bad = read_texts(frame.table, text)
    if bad:
        texts = [texts[i] for i in range(len(texts)) if i not in bad]
        frame.drop(bad)
    keys = None
    if isinstance(encoder, FillInMiddleEncoder):
        keys = numpy_of(column(frame.table, KEY, "random keys")).view(np.uint64)
    try:
        ids = _encode(encoder, texts, keys)
    except BaseException as fault:
        if not _is_row_fault(fault):
            raise
        ids = _encode_each(frame, texts, keys, encoder)
    frame.put(IDS, ids_column(ids))


def _encode(
    encoder: Encoder | FillInMiddleEncoder, texts: list[str], keys: np.ndarray | None
) -> Ragged:
    if isinstance(encoder, FillInMiddleEncoder):
        assert keys is not None, "the slice stage makes the keys"
        return encoder.encode(texts, keys)
    return encoder.encode(texts)


def _encode_each(
    frame: RowFrame,
    texts: list[str],
    keys: np.ndarray | None,
    encoder: Encoder | FillInMiddleEncoder,
) -> Ragged:
    bad: Bad = {}
    parts = []
    for i, text in enumerate(texts):
        try:
            parts.append(_encode(encoder, [text], None if keys is None else keys[i : i + 1]))
        except BaseException as fault:
            if not _is_row_fault(fault):
                raise
            bad[i] = f"could not be tokenized: {error_text(fault)}"
    frame.drop(bad)
    return Ragged.concat(parts)


def _is_row_fault(fault: BaseException) -> bool:
    """Return whether the text of a row causes the error.

    A panic of the tokenizer (Rust) is not an Exception, but is caused by the text.
    """
    return (isinstance(fault, Exception) and not isinstance(fault, MemoryError)) or type(
        fault
    ).__name__ == "PanicException"
