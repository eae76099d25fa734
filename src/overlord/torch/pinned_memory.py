"""Copy many arrays to a device by one call.

The arrays are packed into a pinned buffer, copied on a separate stream, and viewed on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from overlord.torch.tensor_step import tensor_of

ALIGN = 256  # bytes; the alignment of the device's allocator
BUFFERS = 2  # one is filled while the other is copied


class DeviceCopy(NamedTuple):
    """A copy to the device that may still be in progress."""

    flat: torch.Tensor
    done: Any  # torch.cuda.Event

    def wait_on_stream(self) -> None:
        """Make the current stream of the calling thread wait for the copy.

        Register the memory with that stream, so that it is not reused before the stream's work.
        """
        stream = torch.cuda.current_stream(self.flat.device)
        stream.wait_event(self.done)
        self.flat.record_stream(stream)


def layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return the offset of each array in one buffer, and the buffer's size, in bytes.

    Arrays with equal address, shape, strides and dtype share an offset.
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
    """Copy the arrays into a buffer, each to its offset; copy shared arrays once."""
    done = set()
    for array, o in zip(arrays, offsets, strict=True):
        if array.nbytes and o not in done:
            np.copyto(buffer[o : o + array.nbytes].view(array.dtype).reshape(array.shape), array)
            done.add(o)


def views(
    flat: torch.Tensor, arrays: Sequence[np.ndarray], offsets: Sequence[int]
) -> deque[torch.Tensor]:
    """Return the arrays as views of ``flat``, a tensor of bytes that ``fill`` has laid out."""
    return deque(
        flat[o : o + array.nbytes]
        .view(tensor_of(array[:0] if array.ndim else array).dtype)
        .reshape(array.shape)
        for array, o in zip(arrays, offsets, strict=True)
    )


class PinnedBuffers:
    """Host buffers, used in turn, and the stream that copies from them; ``pin``: pin the buffers.

    Runs on: one thread.
    """

    def __init__(self, device: torch.device, pin: bool):
        self._device, self._pin, self._turn = device, pin, 0
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._events: list[Any] = [None] * BUFFERS

    def copy(self, arrays: Sequence[np.ndarray]) -> tuple[DeviceCopy, deque[torch.Tensor]]:
        """Start the copy of arrays; return it, and the arrays as tensors on the device.

        The tensors may be used after ``wait_on_stream``. The arrays may be changed at once.
        """
        # The default device of a new thread is 0, and pinning would open a context there.
        with torch.cuda.device(self._device):
            return self._start_copy(arrays)

    def _start_copy(self, arrays: Sequence[np.ndarray]) -> tuple[DeviceCopy, deque[torch.Tensor]]:
        offsets, total = layout(arrays)
        k, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if self._events[k] is not None:
            self._events[k].synchronize()  # the last copy from this buffer is complete
        if len(self._buffers[k]) < total:
            self._buffers[k] = torch.empty(
                total + total // 4, dtype=torch.uint8, pin_memory=self._pin
            )
        fill(self._buffers[k].numpy(), arrays, offsets)
        with torch.cuda.stream(self._stream):
            flat = torch.empty(total, dtype=torch.uint8, device=self._device)
            flat.copy_(self._buffers[k][:total], non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
            done.record(self._stream)
        self._events[k] = done
        return DeviceCopy(flat, done), views(flat, arrays, offsets)
