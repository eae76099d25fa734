"""Values into parcels, envelopes into values. Here it is decided what goes by reference and what is
copied.

An array that lies in a slot of our ring goes as (slot, offset); the slot's memory is passed once.
Other arrays are copied into one slot together, or stand in the frame when they are small. Over TCP
everything stands in the frame.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.errors import FrameError
from overlord.transport import codec, frame
from overlord.transport.frame import CODES, DTYPES, MAX_DIMS
from overlord.transport.peer_segments import PeerSegments
from overlord.transport.segment import Segment
from overlord.transport.shared_memory import CELLS, Lease, SharedMemoryPool
from overlord.transport.socket_io import (
    FORGET,
    FRAME,
    RING,
    SHARED,
    IncomingMessage,
    Memory,
    OutgoingMessage,
)
from overlord.transport.value_codec import owned

INLINE_BYTES = 2**15  # below it two copies through the socket cost less than a slot
CHUNK_BYTES = 2**16
# What stands before the frame of a message by reference: how many grants and references, then
# these, up to the next multiple of 64.
_COUNTS = struct.Struct("<II")
_GRANT = struct.Struct(
    "<QQQ"
)  # slot, cell, bytes of the slot if it is passed here for the first time
_REFERENCE = struct.Struct(f"<QQQBB6x{MAX_DIMS}Q")  # column, grant, offset, dtype, dims, shape
_NO_DIMS = [(0,) * (MAX_DIMS - n) for n in range(MAX_DIMS + 1)]
_RING_BODY = struct.Struct("<I")
NOTHING = object()  # an envelope that holds no value
Take = Callable[[int], np.ndarray | None]


@dataclass(slots=True, kw_only=True)
class EncodedMessage:
    """A value made ready: what lies in a slot, and what does not."""

    header: bytes
    columns: list[np.ndarray]
    places: dict[int, tuple[Segment, int]]  # column -> slot, offset
    keep: np.ndarray | None = None


class MessageEncoder:
    """One link's way out."""

    def __init__(self, ring: SharedMemoryPool | None, name: str, hangup_fd: int = -1):
        self.ring, self._name, self._hangup_fd = ring, name, hangup_fd
        self._holder: Lease | None = None

    def load(self, value: Any, take: Take) -> EncodedMessage:
        """Copies what must be copied. No lock is held here: it may take long, and it may wait for a
        slot.
        """
        header, columns = codec.encode(value)
        loaded = EncodedMessage(header=header, columns=columns, places={})
        if self.ring is None or not columns:
            return loaded
        loose, total = [], 0
        for i, column in enumerate(columns):
            place = self.ring.locate(column) if column.nbytes and not owned(column) else None
            if place is not None:
                loaded.places[i] = place
            elif column.nbytes:
                loose.append((i, total))
                total += -(-column.nbytes // frame.ALIGN) * frame.ALIGN
        if total > INLINE_BYTES and (memory := take(total)) is not None:
            self._copy(loaded, loose, memory)
        return loaded

    def _copy(
        self, loaded: EncodedMessage, loose: list[tuple[int, int]], memory: np.ndarray
    ) -> None:
        assert self.ring is not None
        found = self.ring.locate(memory)
        if found is None:
            return  # the ring was closed meanwhile
        for i, at in loose:
            column = loaded.columns[i]
            np.copyto(memory[at : at + column.nbytes], column.reshape(-1).view(np.uint8))
            loaded.places[i] = (found[0], found[1] + at)
        loaded.keep = memory

    def parcels(self, loaded: EncodedMessage) -> list[OutgoingMessage]:
        """What is to be sent, in order. Under the link's lock: who passes a slot first is decided
        here.
        """
        out = self.notices()
        cells: dict[int, tuple[int, Segment]] = {}  # slot number -> cell, slot
        if loaded.places:
            out += self._introduction()
            cells = self._hold(loaded)
        if not cells:
            return [*out, OutgoingMessage(FRAME, frame.pack(loaded.header, loaded.columns))]
        return [*out, self._shared(loaded, cells)]

    def notices(self) -> list[OutgoingMessage]:
        """Slots that are no more, so that the peer unmaps them."""
        if self._holder is None or not self._holder.forgets:
            return []
        gone = [self._holder.forgets.popleft() for _ in range(min(len(self._holder.forgets), 4096))]
        return [OutgoingMessage(FORGET, [np.array(gone, "<i8").tobytes()])]

    def _introduction(self) -> list[OutgoingMessage]:
        assert self.ring is not None
        if self._holder is not None:
            return []
        self._holder = Lease(self._name, self._hangup_fd)
        self.ring.attach(self._holder)
        return [
            OutgoingMessage(
                RING,
                [_RING_BODY.pack(CELLS)],
                [self._holder.fd, self.ring.bell.fd],
                keep=(self._holder, self.ring.bell),
            )
        ]

    def _hold(self, loaded: EncodedMessage) -> dict[int, tuple[int, Segment]]:
        assert self.ring is not None
        assert self._holder is not None
        cells: dict[int, tuple[int, Segment]] = {}
        for i, (slot, _) in list(loaded.places.items()):
            if slot.id not in cells:
                cell = self.ring.hold(self._holder, slot)
                if (
                    cell < 0
                ):  # the peer holds too many messages: this column is copied through the socket
                    del loaded.places[i]
                    continue
                cells[slot.id] = (cell, slot)
        return cells

    def _shared(
        self, loaded: EncodedMessage, cells: dict[int, tuple[int, Segment]]
    ) -> OutgoingMessage:
        assert self._holder is not None
        order = {number: k for k, number in enumerate(cells)}
        fresh = [slot for _, slot in cells.values() if slot.id not in self._holder.known]
        parts = [_COUNTS.pack(len(cells), len(loaded.places))]
        parts += [
            _GRANT.pack(n, cell, slot.nbytes if slot in fresh else 0)
            for n, (cell, slot) in cells.items()
        ]
        for i, (slot, offset) in loaded.places.items():
            shape = loaded.columns[i].shape
            code = CODES[loaded.columns[i].dtype]
            parts.append(
                _REFERENCE.pack(
                    i, order[slot.id], offset, code, len(shape), *shape, *_NO_DIMS[len(shape)]
                )
            )
        size = sum(map(len, parts))
        parts.append(bytes(-size % frame.ALIGN))
        inline = [column for i, column in enumerate(loaded.columns) if i not in loaded.places]
        self._holder.known.update(slot.id for slot in fresh)
        pieces = [b"".join(parts), *frame.pack(loaded.header, inline)]
        return OutgoingMessage(SHARED, pieces, [slot.fd for slot in fresh], keep=fresh)

    def close(self) -> None:
        if self.ring is not None and self._holder is not None:
            self.ring.detach(self._holder)


class MessageDecoder:
    """One link's way in."""

    def __init__(self, memory: Memory, max_held: int):
        self._memory = memory
        self.slots = PeerSegments()
        self.max_held = max_held
        self.copied = 0  # messages that were copied because their reader held too many slots

    def open(self, envelope: IncomingMessage) -> Any:
        """The value of an envelope, or ``NOTHING``; whatever is wrong with it is a
        ``FrameError``.
        """
        try:
            if envelope.kind == FRAME:
                self._wants_files(envelope, 0)
                return codec.decode(*frame.unpack(envelope.body))
            if envelope.kind == SHARED:
                return self._open_shared(envelope)
            self._open_notice(envelope)
            return NOTHING
        finally:
            for fd in envelope.files:
                os.close(fd)

    @staticmethod
    def _wants_files(envelope: IncomingMessage, n: int) -> None:
        if len(envelope.files) != n:
            raise FrameError(
                f"expected {n} open files with an envelope of kind {envelope.kind}, got "
                f"{len(envelope.files)}"
            )

    def _open_notice(self, envelope: IncomingMessage) -> None:
        body = bytes(envelope.body)
        if envelope.kind == FORGET:
            self._wants_files(envelope, 0)
            if len(body) % 8:
                raise FrameError(f"expected numbers of slots, got {len(body)} bytes")
            self.slots.forget(np.frombuffer(body, "<i8").tolist())
        elif envelope.kind == RING:
            self._wants_files(envelope, 2)
            if len(body) != _RING_BODY.size:
                raise FrameError(f"expected {_RING_BODY.size} bytes of a ring, got {len(body)}")
            self.slots.open(*envelope.files, *_RING_BODY.unpack(body))

    def _open_shared(self, envelope: IncomingMessage) -> Any:
        grants, references, at = _table(envelope.body)
        header, columns = frame.unpack(memoryview(envelope.body)[at:])  # type: ignore[arg-type]
        fresh = [(slot, nbytes) for slot, _, nbytes in grants if nbytes]
        self._wants_files(envelope, len(fresh))
        for (slot, nbytes), fd in zip(fresh, envelope.files, strict=True):
            self.slots.add(slot, nbytes, fd)
        crowded = self.slots.crowded([slot for slot, _, _ in grants], self.max_held)
        roots = [self.slots.root(slot, cell) for slot, cell, _ in grants]
        joined = _join(references, columns, roots)
        if crowded:
            self.copied += 1
            joined = [self._copied(column) for column in joined]
        return codec.decode(header, joined)

    def _copied(self, column: np.ndarray) -> np.ndarray:
        if column.nbytes < CHUNK_BYTES:
            out = column.copy()
        else:
            out = (
                self._memory(column.nbytes)[: column.nbytes]
                .view(column.dtype)
                .reshape(column.shape)
            )
            np.copyto(out, column)
        out.flags.writeable = False
        return out

    def close(self) -> None:
        self.slots.close()


def _table(body: bytes | np.ndarray) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Grants, references, and where the frame begins."""
    if len(body) < _COUNTS.size:
        raise FrameError(f"expected grants and references, got {len(body)} bytes")
    n_grants, n_references = _COUNTS.unpack_from(body)  # type: ignore[arg-type]
    middle = _COUNTS.size + n_grants * _GRANT.size
    end = middle + n_references * _REFERENCE.size
    at = -(-end // frame.ALIGN) * frame.ALIGN
    if at > len(body):
        raise FrameError(
            f"expected {n_grants} grants and {n_references} references, got {len(body)} bytes"
        )
    view = memoryview(body)  # type: ignore[arg-type]
    return (
        list(_GRANT.iter_unpack(view[_COUNTS.size : middle])),
        list(_REFERENCE.iter_unpack(view[middle:end])),
        at,
    )


def _join(
    rows: list[tuple[int, ...]], inline: list[np.ndarray], roots: list[np.ndarray]
) -> list[np.ndarray]:
    """All columns in their order: those of the slots at their places, the others between."""
    places = {row[0]: row for row in rows}
    total = len(rows) + len(inline)
    if len(places) != len(rows) or max(places, default=0) >= max(1, total):
        raise FrameError(
            f"expected references to distinct columns of {total}, got {sorted(places)[:20]}"
        )
    rest = iter(inline)
    return [_view(places[i], roots) if i in places else next(rest) for i in range(total)]


def _view(row: tuple[int, ...], roots: list[np.ndarray]) -> np.ndarray:
    """A column in a slot. Nothing of the reference is believed before it is checked."""
    i, grant, offset, code, dims = row[:5]
    if grant >= len(roots) or code >= len(DTYPES) or dims > MAX_DIMS:
        raise FrameError(
            f"expected a known slot and dtype, got {grant}, {code}, and {dims} dimensions",
            f"column {i}",
        )
    shape, root, dtype = row[5 : 5 + dims], roots[grant], DTYPES[code]
    if offset + math.prod(shape) * dtype.itemsize > len(root):
        raise FrameError(
            f"expected a place within the {len(root)} bytes of its slot, got "
            f"{dtype}{list(shape)} at {offset}",
            f"column {i}",
        )
    try:
        return np.ndarray(shape, dtype, root, offset)
    except (ValueError, OverflowError) as e:
        raise FrameError(f"expected a shape that can be, got {shape}", f"column {i}") from e
