"""Execution of Pair and Group: token ids, loss weights and values of the documents of each row.

The documents of a row follow each other in its ids. A prompt is encoded once, and begins each of
them. A row with a document that cannot be used is dropped as a whole, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from overlord.content import ones_like
from overlord.documents import LENGTHS, PROMPTS
from overlord.sample import Column, Ragged, ranges
from overlord.sources.tables import column_of, is_mixed
from overlord.transforms.base import IDS, Tokens
from overlord.transforms.chat import Chat
from overlord.transforms.chat_encoder import ChatEncoder
from overlord.transforms.columns import (
    HIDDEN,
    Bad,
    Check,
    RowFrame,
    Unfit,
    check_ids,
    check_meta,
    check_texts,
    column,
    ids_column,
    kind_of,
    lists,
    null_rows,
    read_ids,
    read_meta,
    read_texts,
)
from overlord.transforms.document_groups import Group, GroupedIds, Pair
from overlord.transforms.encoders import check_messages, check_tools, encoded_chats, encoded_texts
from overlord.transforms.loss_weights import check_weights, put_weights, read_weights
from overlord.transforms.tokenize import Encoder

# A reader returns the values of a column, one for each row, and the rows that cannot be read.
Read = Callable[[pa.Table, str], tuple[Any, Bad]]


class Documents(NamedTuple):
    """Values of documents, row after row: texts, conversations or ids."""

    values: Any  # a list, or a Ragged of ids or weights
    offsets: np.ndarray  # int64 [rows + 1]: documents of each row

    @property
    def counts(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def row(self) -> np.ndarray:
        """The row of each document."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def take(self, rows: np.ndarray) -> Documents:
        counts = self.counts[rows]
        at = ranges(self.offsets[rows], counts)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return Documents(taken(self.values, at), offsets)


def taken(values: Any, at: np.ndarray) -> Any:
    return values.take(at) if isinstance(values, Ragged) else [values[i] for i in at.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The ids of documents, with what is known of each token and document."""

    ids: Ragged
    prompts: np.ndarray  # int64: tokens of the prompt of each document
    weights: Ragged | None  # loss weights; None: all are 1


def checks_of(t: GroupedIds) -> list[tuple[str, Check]]:
    """Return the columns that a grouped transform reads, with the check of each."""
    spec, encode = t.spec, t.encode
    one: Check = check_texts
    if isinstance(encode, Tokens):
        one = check_ids
    elif isinstance(encode, Chat):
        one = check_conversations
    several = isinstance(spec, Group)
    found = [(name, check_lists(one) if several else one) for name in spec.documents]
    found += [] if spec.prompt is None else [(spec.prompt, one)]
    if isinstance(encode, Chat) and isinstance(encode.tools, str):
        found.append((encode.tools, check_tools))
    listed = len(t.loss) == 1
    found += [(name, check_lists(check_weights) if listed else check_weights) for name in t.loss]
    return [*found, *((name, check_meta) for name in t.value_columns)]


def check_conversations(table: pa.Table, name: str) -> None:
    """Raise Unfit unless the column may hold conversations: messages, or the text of one."""
    kind = kind_of(table, name, "conversations")
    if not (pt.is_string(kind) or pt.is_large_string(kind) or pt.is_struct(kind)):
        check_messages(table, name)


def check_lists(check: Check) -> Check:
    """Return a check of lists whose values pass another check."""

    def of_lists(table: pa.Table, name: str) -> None:
        kind = kind_of(table, name, "lists of responses")
        if pt.is_null(kind) or is_mixed(kind):
            return
        if not (pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)):
            raise Unfit(
                f"column {name!r}: expected a list with one value for each response, got {kind}"
            )
        check(pa.table({name: pa.nulls(0, kind.value_type)}), name)

    return of_lists


def run_grouped(frame: RowFrame, t: GroupedIds, encoder: Encoder | ChatEncoder | None) -> None:
    """Put the ids, weights and values of the documents of each row into a frame."""
    read = _reader(t)
    documents, bad = _read_documents(frame.table, t.spec, t.spec.documents, read)
    bad = _incomplete(t.spec, documents, bad)
    prompts, prompt_bad = _read_prompts(frame.table, t, read)
    weights, weight_bad = _read_loss(frame.table, t, documents)
    values, value_bad = _read_values(frame.table, t, documents.counts)
    bad = prompt_bad | weight_bad | value_bad | bad
    rows = np.array([i for i in range(frame.table.num_rows) if i not in bad], np.int64)
    _drop(frame, t, bad)
    if not len(rows):
        return
    documents, prompts = documents.take(rows), None if prompts is None else taken(prompts, rows)
    weights = None if weights is None else weights.take(rows)
    tools = _tools(frame.table, t)
    if isinstance(encoder, ChatEncoder):
        encoded, late = _encode_chats(encoder, t, documents, prompts, tools)
    elif encoder is None:
        encoded, late = _join_ids(documents, prompts, weights), Bad()
    else:
        encoded, late = _encode_texts(encoder, documents, prompts)
    late = {int(documents.row[d]): reason for d, reason in sorted(late.items(), reverse=True)}
    kept = np.array([i for i in range(len(rows)) if i not in late], np.int64)
    _drop(frame, t, late)
    if len(kept):
        at = ranges(documents.offsets[kept], documents.counts[kept])
        _put(frame, _select(encoded, at), documents.take(kept).offsets)
        for name, column_values in values.items():
            frame.put(HIDDEN + name, ids_column(column_values.take(rows[kept])))


def _drop(frame: RowFrame, t: GroupedIds, bad: Bad) -> None:
    frame.drop({i: f"{t.spec!r}: {reason}" for i, reason in sorted(bad.items())})


def _select(encoded: Encoded, at: np.ndarray) -> Encoded:
    weights = None if encoded.weights is None else encoded.weights.take(at)
    return Encoded(encoded.ids.take(at), encoded.prompts[at], weights)


def _put(frame: RowFrame, encoded: Encoded, offsets: np.ndarray) -> None:
    """Put documents into a frame; ``offsets``: documents of each row."""
    frame.put(IDS, ids_column(Ragged(encoded.ids.values, encoded.ids.offsets[offsets])))
    frame.put(HIDDEN + LENGTHS, ids_column(Ragged(encoded.ids.lengths, offsets)))
    frame.put(HIDDEN + PROMPTS, ids_column(Ragged(encoded.prompts, offsets)))
    weights = encoded.weights
    if weights is not None:
        weights = Ragged(weights.values, weights.offsets[offsets])
    frame.table = put_weights(frame.table, weights)


# ----------------------------------------------------------------------------
# Reading of columns: documents, prompts, loss weights and values.


def _reader(t: GroupedIds) -> Read:
    if isinstance(t.encode, Tokens):
        return read_ids
    return _read_conversations if isinstance(t.encode, Chat) else read_texts


def _read_conversations(table: pa.Table, name: str) -> tuple[list[Any], Bad]:
    array = column(table, name, "conversations")
    bad = {int(i): f"{name} is null or missing" for i in null_rows(array)}
    return array.to_pylist(), bad


def _read_documents(
    table: pa.Table, spec: Pair | Group, names: Sequence[str], read: Read
) -> tuple[Documents, Bad]:
    """Return the documents of every row, from two columns or from one column of lists."""
    if len(names) == 1:
        return _read_lists(table, names[0], read)
    n = table.num_rows
    found = [read(table, name) for name in names]
    order = np.arange(2 * n).reshape(2, n).T.ravel()
    joined: Any = [value for values, _ in found for value in values]
    if isinstance(found[0][0], Ragged):
        joined = Ragged.concat([values for values, _ in found])
    bad = found[1][1] | found[0][1]
    return Documents(taken(joined, order), np.arange(n + 1) * 2), bad


def _read_lists(table: pa.Table, name: str, read: Read) -> tuple[Documents, Bad]:
    array = column(table, name, "lists of responses")
    bad = {int(i): f"{name} is null or missing" for i in null_rows(array)}
    if is_mixed(array.type) or pt.is_null(array.type):
        given = [value if isinstance(value, list) else [] for value in array.to_pylist()]
        flat, unread = column_of([value for values in given for value in values])
        offsets = np.concatenate(([0], np.cumsum([len(values) for values in given])))
    else:
        flat, offsets = lists(array)
        unread = {}
        if len(nulls := null_rows(array)):  # a null of fixed size has values
            counts = np.diff(offsets)
            counts[nulls] = 0
            flat = flat.take(pa.array(ranges(offsets[:-1], counts)))
            offsets = np.concatenate(([0], np.cumsum(counts)))
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    values, faults = read(pa.table({name: flat}), name)
    for d, reason in (unread | faults).items():
        i = int(row[d])
        bad.setdefault(i, f"response {d - int(offsets[i])}: {reason}")
    return Documents(values, offsets.astype(np.int64)), bad


def _incomplete(spec: Pair | Group, documents: Documents, bad: Bad) -> Bad:
    """Return ``bad`` with the rows that lack a response, or have an empty one."""
    values, row = documents.values, documents.row
    empty = (
        np.flatnonzero(values.lengths == 0).tolist()
        if isinstance(values, Ragged)
        else [d for d, value in enumerate(values) if value is not None and not value]
    )
    for d in empty:
        i = int(row[d])
        what = _name_of(spec, d - int(documents.offsets[i]))
        bad.setdefault(i, f"{what}: expected a response, got an empty one")
    size = spec.size if isinstance(spec, Group) else None
    for i, count in enumerate(documents.counts.tolist()):
        if size is not None and count != size:
            bad.setdefault(i, f"{spec.documents[0]}: expected {size} responses, got {count}")
        elif not count:
            bad.setdefault(i, f"{spec.documents[0]}: expected at least one response, got none")
    return bad


def _name_of(spec: Pair | Group, k: int) -> str:
    return spec.documents[k] if isinstance(spec, Pair) else f"{spec.column}, response {k}"


def _read_prompts(table: pa.Table, t: GroupedIds, read: Read) -> tuple[Any, Bad]:
    return (None, {}) if t.spec.prompt is None else read(table, t.spec.prompt)


def _read_loss(
    table: pa.Table, t: GroupedIds, documents: Documents
) -> tuple[Documents | None, Bad]:
    """Return the loss weights of the documents; None without loss columns."""
    if not t.loss:
        return None, {}
    found, bad = _read_documents(table, t.spec, t.loss, read_weights)
    wanted, got, listed = documents.counts, found.counts, ", ".join(t.loss)
    for i in np.flatnonzero(wanted != got).tolist():
        bad.setdefault(i, f"{listed}: expected {wanted[i]} lists of loss weights, got {got[i]}")
    same = np.flatnonzero(wanted == got)
    own, weights = documents.take(same), found.take(same)
    sizes, given = own.values.lengths, weights.values.lengths
    for d in np.flatnonzero(sizes != given).tolist():
        i = int(own.row[d])
        what = _name_of(t.spec, d - int(own.offsets[i]))
        reason = f"expected {sizes[d]} loss weights, one per token, got {given[d]}"
        bad.setdefault(int(same[i]), f"{what}: {reason}")
    return found, bad


def _read_values(
    table: pa.Table, t: GroupedIds, counts: np.ndarray
) -> tuple[dict[str, Ragged], Bad]:
    """Return the values of documents by name: float64, one for each document of a row."""
    made: dict[str, Ragged] = {}
    bad: Bad = {}
    for name, given in (t.spec.values or {}).items():
        names = (given,) if isinstance(given, str) else given
        read = [read_meta(table, one, counts=False) for one in names]
        for one, (values, faults) in zip(names, read, strict=True):
            bad = faults | bad
            for i in _unequal(values, counts if len(names) == 1 else np.ones_like(counts)):
                wanted = f"{counts[i]} numbers, one for each document" if len(names) == 1 else "one"
                bad.setdefault(i, f"{one}: expected {wanted}, got {values[i]!s:.60}")
        made[name] = _by_document([values for values, _ in read], counts)
    return made, bad


def _unequal(values: Column, counts: np.ndarray) -> list[int]:
    if not isinstance(values, Ragged):
        return []
    return np.flatnonzero(values.lengths != counts).tolist()


def _by_document(columns: list[Column], counts: np.ndarray) -> Ragged:
    """Return numbers by document; a row with another number of them has zeros, since it is bad."""
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    found = np.zeros(int(offsets[-1]))
    several = len(columns) > 1
    for k, values in enumerate(columns):
        if isinstance(values, Ragged):
            each = np.ones_like(counts) if several else counts
            fit = np.flatnonzero(values.lengths == each)
            found[ranges(offsets[:-1][fit] + k, each[fit])] = values.take(fit).values
        elif several:
            found[offsets[:-1] + k] = values
        else:
            found[:] = np.repeat(values, counts)
    return Ragged(found, offsets)


def _tools(table: pa.Table, t: GroupedIds) -> list[Any]:
    tools = t.encode.tools if isinstance(t.encode, Chat) else None
    if isinstance(tools, str):
        found: list[Any] = column(table, tools, "tools").to_pylist()
        return found
    return [None] * table.num_rows


# ----------------------------------------------------------------------------
# Encoding: prompt and response of each document.


def _encode_texts(
    encoder: Encoder, documents: Documents, prompts: list[str] | None
) -> tuple[Encoded, Bad]:
    """Return the encoded documents, and the reasons of those that cannot be encoded.

    ``bos`` begins the prompt and ``eos`` ends the response, which are encoded separately.
    """
    if prompts is None:
        ids, bad = encoded_texts(encoder.encode, documents.values)
        return Encoded(ids, np.zeros(len(ids), np.int64), None), bad
    begin, end = encoder.begin_only(), encoder.end_only()
    before, prompt_bad = encoded_texts(begin.encode, prompts)
    after, bad = encoded_texts(end.encode, documents.values)
    row = documents.row
    bad |= {d: prompt_bad[i] for d, i in enumerate(row.tolist()) if i in prompt_bad}
    return _joined(before.take(row), after, None), bad


def _join_ids(documents: Documents, prompts: Ragged | None, weights: Documents | None) -> Encoded:
    given = None if weights is None else weights.values
    if prompts is None:
        return Encoded(documents.values, np.zeros(len(documents.values), np.int64), given)
    return _joined(prompts.take(documents.row), documents.values, given)


def _joined(before: Ragged, after: Ragged, weights: Ragged | None) -> Encoded:
    """Return each prompt followed by its response; tokens of prompts have the weight 0."""
    n = len(after)
    order = np.arange(2 * n).reshape(2, n).T.ravel()
    ids = Ragged.concat([before, after]).take(order)
    ones = ones_like(after) if weights is None else weights
    none = Ragged(np.zeros(int(before.lengths.sum()), ones.values.dtype), _from_zero(before))
    losses = Ragged.concat([none, ones]).take(order)
    ends = ids.offsets[::2]
    return Encoded(Ragged(ids.values, ends), before.lengths, Ragged(losses.values, ends))


def _from_zero(column: Ragged) -> np.ndarray:
    found: np.ndarray = column.offsets - column.offsets[0]
    return found


def _encode_chats(
    encoder: ChatEncoder,
    t: GroupedIds,
    documents: Documents,
    prompts: list[Any] | None,
    tools: list[Any],
) -> tuple[Encoded, Bad]:
    """Return the encoded conversations. The messages of prompts have no loss."""
    row = documents.row.tolist()
    given = [_messages(value, "assistant") for value in documents.values]
    if prompts is None:
        first = _common_messages(given, documents.offsets)
    else:
        begins = [_messages(value, "user") for value in prompts]
        whole = [isinstance(begins[i], list) for i in row]
        first = [len(begins[i]) if ok else 0 for i, ok in zip(row, whole, strict=True)]
        given = [
            [*begins[i], *messages] if ok and isinstance(messages, list) else messages
            for i, ok, messages in zip(row, whole, given, strict=True)
        ]
        given = [m if ok else begins[i] for m, i, ok in zip(given, row, whole, strict=True)]
    ids, weights, bad = encoded_chats(encoder, given, [tools[i] for i in row], first)
    column_of_reason = encoder.spec.messages
    reasons = {
        d: f"{_name_of(t.spec, d - int(documents.offsets[row[d]]))}: "
        + reason.removeprefix(f"{column_of_reason}: ")
        for d, reason in bad.items()
    }
    assert weights is not None, "the responses of a conversation have weights"
    return Encoded(ids, _before_loss(weights), weights), reasons


def _messages(value: Any, role: str) -> Any:
    """Return a conversation as messages; a text is one message of a role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [value] if isinstance(value, dict) else value


def _common_messages(given: list[Any], offsets: np.ndarray) -> list[int]:
    """Return the number of messages that all documents of a row begin with, by document.

    At least one message of each document is its response.
    """
    found: list[int] = []
    for a, b in zip(offsets.tolist(), offsets[1:].tolist(), strict=False):
        several = given[a:b]
        n = 0
        if all(isinstance(messages, list) for messages in several):
            most = max(0, min(map(len, several), default=0) - 1)
            first = [_present(m) for m in several[0][:most]] if several else []
            while n < most and all(_present(messages[n]) == first[n] for messages in several):
                n += 1
        found += [n] * (b - a)
    return found


def _present(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _before_loss(weights: Ragged) -> np.ndarray:
    """Return the number of tokens before the first with a loss, by document."""
    some = np.flatnonzero(weights.values)
    start = weights.offsets[:-1]
    at = np.searchsorted(some, start)
    first = some[np.minimum(at, max(0, len(some) - 1))] if len(some) else start
    found: np.ndarray = np.clip(first - start, 0, weights.lengths)
    return found
