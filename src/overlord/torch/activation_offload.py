"""Keep a share of the activations of a forward in host memory until its backward needs them.

    with ot.offload(mb["offload"], model.layers):
        loss = ...
    loss.backward()

Saved tensors are copied to host memory while the forward continues. Backward copies them back, one
layer ahead of their use if the layers are given. Values, shapes and strides do not change, so
gradients are equal bit by bit. On CUDA each direction has its own stream, and host memory is
pinned. On the CPU these are plain copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from overlord.errors import PlanError
from overlord.torch.host_pool import HostPool, Region

SMALL = 1024  # bytes; smaller tensors are not worth a copy
SPARSE = 8  # a view of less than 1/SPARSE of its storage stays: the whole storage would be copied

_pool = HostPool()


def offload(
    ratio: float, layers: Iterable[nn.Module] | None = None, *, pool: HostPool | None = None
) -> Offload:
    """Return a context that keeps the fraction ``ratio`` of each saved activation in host memory.

    ``layers``: the layers of the model, in order. Activations of the first layer, of the last layer
    and outside layers stay on the device. Backward loads one layer ahead. With ``layers=None`` all
    activations saved inside the context are offloaded, and backward loads each one on use.
    Parameters and tensors below 1024 bytes always stay. One context serves one microbatch.
    ``pool``: host memory; None: the pool of the process.
    """
    value = float(ratio)
    if not 0 <= value <= 1:
        raise PlanError(f"offload: expected a ratio of 0 to 1, got {value}")
    return Offload(value, None if layers is None else list(layers), pool or _pool)


class Offload:
    """The saved activations of one microbatch.

    ``saved_bytes``: bytes of the activations that may be offloaded; ``offloaded_bytes``: bytes of
    them in host memory.
    """

    def __init__(self, ratio: float, layers: list[nn.Module] | None, pool: HostPool):
        self.ratio, self.saved_bytes, self.offloaded_bytes = ratio, 0, 0
        self._layers, self._pool = layers, pool
        self._layer = -1  # the layer whose forward runs; -1: none
        self._arrived = -1  # the layer whose backward runs
        self._by_layer: dict[int, set[weakref.ref[_Stored]]] = {}
        self._known: dict[tuple[int, int], weakref.ref[_Stored]] = {}
        self._exits: list[Any] = []
        self._parameters: set[int] = set()

    def __enter__(self) -> Offload:
        if not self.ratio:
            return self
        for i, layer in enumerate(self._layers or ()):
            self._exits += [
                layer.register_forward_pre_hook(self._entering(i)).remove,
                layer.register_forward_hook(self._leaving).remove,
            ]
            self._parameters |= {p.untyped_storage().data_ptr() for p in layer.parameters()}
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._exits.append(lambda: hooks.__exit__(None, None, None))
        return self

    def __exit__(self, *error: object) -> None:
        while self._exits:
            self._exits.pop()()

    def _entering(self, i: int) -> Any:
        def entering(*_: Any) -> None:
            self._layer = i

        return entering

    def _leaving(self, *_: Any) -> None:
        self._layer = -1

    def _pack(self, tensor: Tensor) -> _View | _Kept:
        """Return a handle for a tensor that autograd saves."""
        layer = self._layer
        stays = self._layers is not None and not 0 < layer < len(self._layers) - 1
        if stays or not self._is_activation(tensor):
            return _Kept(layer, tensor.detach())
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, int(tensor._version))
        stored = known() if (known := self._known.get(key)) is not None else None
        if stored is None:
            size = tensor.untyped_storage().nbytes()
            self.saved_bytes += size
            cut = max(1, round(self.ratio * size))
            stored = _Stored(tensor, cut, layer, storage, self._pool)
            self.offloaded_bytes += cut
            self._known[key] = weakref.ref(stored)
        self._by_layer.setdefault(layer, set()).add(self._known[key])
        return _View(stored, layer, tensor)

    def _is_activation(self, tensor: Tensor) -> bool:
        """Return whether a tensor may be offloaded: strided, large enough, and not a parameter."""
        base = tensor if tensor._base is None else tensor._base
        if type(tensor) is not Tensor or isinstance(base, nn.Parameter):
            return False
        if tensor.layout != torch.strided or (base.is_leaf and base.requires_grad):
            return False
        size, whole = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        return (
            size >= SMALL
            and whole <= SPARSE * size
            and tensor.untyped_storage().data_ptr() not in self._parameters
        )

    def _unpack(self, handle: _View | _Kept) -> Tensor:
        """Return the tensor of a handle, in backward."""
        self._arrive(handle.layer)
        if isinstance(handle, _Kept):
            return handle.tensor
        return handle.restored(keep=self._layers is not None)

    def _arrive(self, layer: int) -> None:
        """Start to load the previous layer, and release all later layers, once per layer.

        Memory that several layers saved stays until the backward of the first of them has run.
        """
        if self._layers is None or layer in (-1, self._arrived):
            return
        self._arrived = layer
        for i in list(self._by_layer):
            for stored in self._of(i):
                if stored.layer > layer:
                    stored.drop()
                elif i == layer - 1:
                    stored.load()

    def _of(self, layer: int) -> list[_Stored]:
        found = (ref() for ref in self._by_layer.get(layer, ()))
        return [stored for stored in found if stored is not None]

    def loaded(self) -> list[int]:
        """Return the layers whose offloaded memory is on the device again, for traces."""
        return sorted(
            layer
            for layer in self._by_layer
            if any(stored.is_loaded and stored.layer == layer for stored in self._of(layer))
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that stays on its device."""

    layer: int
    tensor: Tensor


class _View:
    """A saved tensor: a view of stored memory, which several views may share."""

    __slots__ = ("_dtype", "_offset", "_shape", "_stored", "_stride", "layer")

    def __init__(self, stored: _Stored, layer: int, tensor: Tensor):
        self.layer, self._stored, self._dtype = layer, stored, tensor.dtype
        self._offset, self._shape, self._stride = (
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )

    def restored(self, keep: bool) -> Tensor:
        """Return the tensor that was saved; ``keep`` the memory on the device for other views."""
        memory = self._stored.memory(keep)
        made = torch.empty(0, dtype=self._dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), self._offset, self._shape, self._stride)


class _Stored:
    """The storage of saved tensors: its first bytes on the host, the rest on the device.

    ``layer``: the first layer that saved it, whose backward is the last to use it.
    """

    def __init__(
        self, tensor: Tensor, cut: int, layer: int, storage: StorageWeakRef, pool: HostPool
    ):
        self.layer, self._device = layer, tensor.device
        self._storage = storage  # while this reference exists, no other storage gets its address
        self._streams = _streams(tensor.device)
        region = pool.take(cut, pinned=self._streams is not None)
        weakref.finalize(self, pool.release, region).atexit = False
        whole = _bytes(tensor.untyped_storage(), tensor.device)
        self._rest = whole[cut:].clone() if cut < len(whole) else None
        self._host = region.memory
        self._done = self._copy_out(whole[:cut], region)
        self._memory: Tensor | None = None
        self._loaded: Any = None  # event

    def _copy_out(self, part: Tensor, region: Region) -> Any:
        if self._streams is None:
            region.memory.copy_(part)
            return None
        out, back = self._streams
        out.wait_stream(torch.cuda.current_stream(self._device))
        if region.reused:
            out.wait_stream(back)  # which may still copy from this memory
        with torch.cuda.stream(out):
            region.memory.copy_(part, non_blocking=True)
            part.record_stream(out)
            return out.record_event()

    def load(self) -> None:
        """Start to copy the memory to the device, unless it is there or the copy has started."""
        if self._memory is not None:
            return
        if self._streams is None:
            self._memory = self._copied()
            return
        back = self._streams[1]
        back.wait_event(self._done)
        with torch.cuda.stream(back):
            self._memory = self._copied()
            if self._rest is not None:
                self._rest.record_stream(back)
            self._loaded = back.record_event()

    def _copied(self) -> Tensor:
        cut, rest = len(self._host), self._rest
        size = cut + (0 if rest is None else len(rest))
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        memory[:cut].copy_(self._host, non_blocking=True)
        if rest is not None:
            memory[cut:].copy_(rest, non_blocking=True)
        return memory

    def memory(self, keep: bool) -> Tensor:
        """Return the memory on the device; the current stream waits for its copy.

        ``keep``: hold it for the next call.
        """
        self.load()
        memory = self._memory
        assert memory is not None
        if self._loaded is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._loaded)
            memory.record_stream(stream)
        if not keep:
            self._memory = None
        return memory

    @property
    def is_loaded(self) -> bool:
        return self._memory is not None

    def drop(self) -> None:
        """Release the memory on the device; ``load`` can copy it again."""
        self._memory = None


def _bytes(storage: Any, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


_by_device: dict[torch.device, tuple[Any, Any]] = {}


def _streams(device: torch.device) -> tuple[Any, Any] | None:
    """Return the streams for copies to the host and to the device; None unless on CUDA."""
    if device.type != "cuda":
        return None
    if device not in _by_device:
        _by_device[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return _by_device[device]
