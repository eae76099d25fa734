"""From many arrays to the device by one copy: packed into a pinned buffer, copied on a stream of
its own, cut into views there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from overlord.torch.tensor_step import tensor_of

ALIGN = 256  # bytes; what the device's own allocator aligns to
BUFFERS = 2  # one is filled while the other is copied


class Placing(NamedTuple):
    """A copy under way."""

    flat: torch.Tensor
    done: Any  # torch.cuda.Event

    def hand_over(self) -> None:
        """To the stream of the calling thread: it waits for the copy, and the memory is not used
        again before it is through with it.
        """
        stream = torch.cuda.current_stream(self.flat.device)
        stream.wait_event(self.done)
        self.flat.record_stream(stream)


def layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each array begins in one buffer, and the buffer's bytes. What is the same memory has
    one place.
    """
    offsets, total = [], 0
    known: dict[Any, int] = {}
    for array in arrays:
        same = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)
        if same not in known:
            known[same] = total
            total += -(-array.nbytes // ALIGN) * ALIGN
        offsets.append(known[same])
    return offsets, total


def fill(buffer: np.ndarray, arrays: Sequence[np.ndarray], offsets: Sequence[int]) -> None:
    done = set()
    for array, o in zip(arrays, offsets, strict=True):
        if array.nbytes and o not in done:
            np.copyto(buffer[o : o + array.nbytes].view(array.dtype).reshape(array.shape), array)
            done.add(o)


def views(
    flat: torch.Tensor, arrays: Sequence[np.ndarray], offsets: Sequence[int]
) -> deque[torch.Tensor]:
    """The arrays again, as parts of one tensor of bytes."""
    return deque(
        flat[o : o + array.nbytes]
        .view(tensor_of(array[:0] if array.ndim else array).dtype)
        .reshape(array.shape)
        for array, o in zip(arrays, offsets, strict=True)
    )


class PinnedBuffers:
    """Pinned buffers, used in turn, and the stream that copies from them. For one thread."""

    def __init__(self, device: torch.device, pin: bool):
        self._device, self._pin, self._turn = device, pin, 0
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._events: list[Any] = [None] * BUFFERS

    def copy(self, arrays: Sequence[np.ndarray]) -> tuple[Placing, deque[torch.Tensor]]:
        """Starts the copy; the tensors may be used after ``hand_over``, the arrays at once."""
        with torch.cuda.device(
            self._device
        ):  # a thread's own is the first one, and pinning would open a context there
            return self._copied(arrays)

    def _copied(self, arrays: Sequence[np.ndarray]) -> tuple[Placing, deque[torch.Tensor]]:
        offsets, total = layout(arrays)
        k, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if self._events[k] is not None:
            self._events[k].synchronize()  # what was in this buffer has left it
        if len(self._buffers[k]) < total:
            self._buffers[k] = torch.empty(
                total + total // 4, dtype=torch.uint8, pin_memory=self._pin
            )
        fill(self._buffers[k].numpy(), arrays, offsets)
        with torch.cuda.stream(self._stream):
            flat = torch.empty(total, dtype=torch.uint8, device=self._device)
            flat.copy_(self._buffers[k][:total], non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps
            done.record(self._stream)
        self._events[k] = done
        return Placing(flat, done), views(flat, arrays, offsets)
