"""Microbatches as tensors that share the memory of their step, without copies.

The memory is read-only: it belongs to the step, and other ranks may map the same pages. Each tensor
keeps it alive. torch has no read-only tensors, so nothing prevents ``tensor.add_(1)``: it may
change the data of other ranks, or crash the process. Copy first, or copy to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from overlord.client.client import Microbatch, Piece, Step
from overlord.messages.control import EncodedState
from overlord.torch.microbatch_info import MicrobatchInfo

# Keys that stay on the CPU, which reads them to call a collective, to size a kernel or to find
# rows. On a device each read would cost a synchronization.
HOST_KEYS = frozenset(
    (
        "max_seqlen",
        "send_splits",
        "recv_splits",
        "send_lens",
        "send_rows",
        "out_lens",
        "recv_perm",
        "recv_rows",
        "item_ids",
        "image_token_index",
        "image_microbatch",
        "document_lengths",
        "cp_ranks",
        "cp_rank",
        "local_cp_size",
        "offload",
        "task_index",
        "task_order",
    )
)


class _Writable:
    """A view of an array that has the flag "writable", also if the array is read-only.

    torch warns once about read-only arrays, and then treats them like others.
    """

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: np.ndarray):
        place = array.__array_interface__
        self.__array_interface__ = {**place, "data": (place["data"][0], False)}
        self.array = array  # the tensor keeps this object alive, and with it the step's memory


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the memory of an array and keeps it alive."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def as_tensor(value: Any) -> torch.Tensor:
    """Return a tensor as it is, and an array as a tensor that shares its memory."""
    return value if isinstance(value, torch.Tensor) else tensor_of(value)


def tensors(
    microbatch: Mapping[str, Any],
    device: torch.device | str | None = None,
    *,
    non_blocking: bool = False,
) -> dict[str, torch.Tensor]:
    """Return all keys of a microbatch as tensors.

    Without a device, or on the CPU, the tensors share its memory and must not be written. On
    another device all are copies, except those that the CPU reads (``max_seqlen``, route maps).
    ``non_blocking`` helps only with pinned memory; ``DevicePrefetcher`` has that, and copies in the
    background. A microbatch that another rank fetches has no arrays and raises ``KeyError``.
    """
    made = _shared(microbatch)
    if (
        not made
        and isinstance(microbatch, (Microbatch, TensorMicrobatch))
        and (why := why_missing(microbatch))
    ):
        raise KeyError(f"'tokens' {why}")
    return made if device is None else _moved(made, torch.device(device), non_blocking)


def _shared(microbatch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: as_tensor(value) for key, value in microbatch.items()}


def _moved(
    made: Mapping[str, torch.Tensor], device: torch.device, non_blocking: bool
) -> dict[str, torch.Tensor]:
    return {
        key: t if key in HOST_KEYS else t.to(device, non_blocking=non_blocking)
        for key, t in made.items()
    }


class InStep(NamedTuple):
    """The step of a microbatch, for trainers that iterate microbatches; None: unknown."""

    step: int | None = None
    global_valid_tokens: int | float | None = None
    global_samples: int | None = None
    is_last: bool | None = None


class Contents(NamedTuple):
    """The samples of a microbatch."""

    samples: list[Piece]
    begins: np.ndarray  # tokens of each sample before its piece

    @staticmethod
    def of(microbatch: Mapping[str, Any]) -> Contents:
        """Return the samples of a microbatch; a mapping of another library has none."""
        samples = list(getattr(microbatch, "samples", ()))
        return Contents(samples, getattr(microbatch, "begins", np.zeros(len(samples), np.int64)))


class TensorMicrobatch(Mapping[str, torch.Tensor]):
    """A mapping of name to tensor, with the ``.samples`` and the step of its microbatch."""

    __slots__ = ("_contents", "_facts", "_in_step", "_tensors", "_why")

    def __init__(
        self,
        made: dict[str, torch.Tensor],
        contents: Callable[[], Contents] | Contents,
        facts: MicrobatchInfo | None = None,
        why: str = "",
        in_step: InStep = InStep(),  # noqa: B008  # immutable
    ):
        self._tensors, self._contents, self._facts, self._why = made, contents, facts, why
        self._in_step = in_step

    @staticmethod
    def of(microbatch: Mapping[str, Any]) -> TensorMicrobatch:
        """Return the tensors of a microbatch, which share its memory."""
        return TensorMicrobatch(
            _shared(microbatch),
            lambda: Contents.of(microbatch),
            why=why_missing(microbatch),
            in_step=InStep(*(getattr(microbatch, name, None) for name in InStep._fields)),
        )

    def __getitem__(self, key: str) -> torch.Tensor:
        try:
            return self._tensors[key]
        except KeyError:
            why = self._why or f"is not in this microbatch; it has {', '.join(self._tensors)}"
            raise KeyError(f"{key!r} {why}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def samples(self) -> list[Piece]:
        """The samples of the microbatch."""
        return self._read().samples

    @property
    def begins(self) -> np.ndarray:
        """The tokens of each sample before its piece here: int64, 0 for whole samples."""
        return self._read().begins

    def _read(self) -> Contents:
        return self._contents() if callable(self._contents) else self._contents

    @property
    def step(self) -> int | None:
        """The number of its step."""
        return self._in_step.step

    @property
    def global_valid_tokens(self) -> int | float | None:
        """That of its step: divide summed losses by it."""
        return self._in_step.global_valid_tokens

    @property
    def global_samples(self) -> int | None:
        """Samples of its whole step: divide summed losses of samples, such as pairs, by it."""
        return self._in_step.global_samples

    @property
    def is_last(self) -> bool | None:
        """Whether it is the last microbatch of its step: the optimizer steps after it."""
        return self._in_step.is_last

    def within(self, in_step: InStep) -> TensorMicrobatch:
        """Return the microbatch as part of a step."""
        if in_step == self._in_step:
            return self
        return TensorMicrobatch(self._tensors, self._contents, self._facts, self._why, in_step)

    @property
    def facts(self) -> MicrobatchInfo:
        """Sizes, layout and label convention, for adapters; read on first use.

        A ``DevicePrefetcher`` has set them before the copy; otherwise reading may synchronize.
        """
        if self._facts is None:
            self._facts = MicrobatchInfo.of(self._tensors)
        return self._facts

    def without(self, keys: Sequence[str]) -> TensorMicrobatch:
        """Return the microbatch without some of its keys."""
        kept = {key: t for key, t in self._tensors.items() if key not in keys}
        return TensorMicrobatch(kept, self._contents, self.facts, self._why, self._in_step)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TensorMicrobatch:
        """Return a copy on a device; arrays that the CPU reads stay on the CPU."""
        return TensorMicrobatch(
            _moved(self._tensors, torch.device(device), non_blocking),
            self._contents,
            self.facts,
            self._why,
            self._in_step,
        )

    def pin_memory(self) -> TensorMicrobatch:
        """Return a copy in pinned memory; ``DataLoader(pin_memory=True)`` calls it."""
        return TensorMicrobatch(
            {key: t.pin_memory() for key, t in self._tensors.items()},
            self._contents,
            self._facts,
            self._why,
            self._in_step,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        in_step = self._in_step
        return TensorMicrobatch, (self._tensors, self._read(), self._facts, self._why, in_step)

    def __repr__(self) -> str:
        shown = ", ".join(f"{k} {t.dtype}{list(t.shape)}" for k, t in self._tensors.items())
        return f"TensorMicrobatch({shown})"


class TensorStep:
    """A step of tensors: the attributes of a ``Step``, with ``TensorMicrobatch`` items."""

    __slots__ = (
        "_microbatches",
        "encoder",
        "expected_microbatches",
        "global_samples",
        "global_valid_tokens",
        "plan_digest",
        "rank",
        "served_by",
        "stage",
        "step",
    )

    def __init__(
        self,
        about: Mapping[str, Any],
        microbatches: Sequence[TensorMicrobatch],
        encoder: Sequence[TensorMicrobatch] = (),
    ):
        self.step: int = about["step"]
        self.rank: int = about["rank"]
        self.global_valid_tokens: int | float = about["global_valid_tokens"]
        self.global_samples: int = about["global_samples"]
        self.plan_digest: str = about["plan_digest"]
        self.served_by: int = about["served_by"]  # the rank that fetches for this one, or itself
        self.stage: str | int | None = about["stage"]
        self.expected_microbatches: int | None = about["expected_microbatches"]
        last = len(microbatches) - 1
        self._microbatches = tuple(
            mb.within(InStep(self.step, self.global_valid_tokens, self.global_samples, m == last))
            for m, mb in enumerate(microbatches)
        )
        self.encoder = tuple(encoder)

    @staticmethod
    def of(
        step: Step | TensorStep,
        device: torch.device | str | None = None,
        *,
        non_blocking: bool = False,
    ) -> TensorStep:
        """Return the tensors of a step, which share its memory; on another device, copies."""
        if not isinstance(step, TensorStep):
            step = TensorStep(
                about(step),
                [TensorMicrobatch.of(mb) for mb in step],
                [TensorMicrobatch.of(s) for s in slots_of(step)],
            )
        return step if device is None else step.to(device, non_blocking=non_blocking)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TensorStep:
        """Return a copy on a device; arrays that the CPU reads stay on the CPU."""
        return self._each(lambda mb: mb.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TensorStep:
        """Return a copy in pinned memory."""
        return self._each(TensorMicrobatch.pin_memory)

    def _each(self, change: Callable[[TensorMicrobatch], TensorMicrobatch]) -> TensorStep:
        return TensorStep(
            self._about(),
            [change(mb) for mb in self._microbatches],
            [change(mb) for mb in self.encoder],
        )

    def _about(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ABOUT}

    def __len__(self) -> int:
        return len(self._microbatches)

    def __getitem__(self, m: int) -> TensorMicrobatch:
        return self._microbatches[m]

    def __iter__(self) -> Iterator[TensorMicrobatch]:
        return iter(self._microbatches)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorStep, (self._about(), self._microbatches, self.encoder)

    def __repr__(self) -> str:
        return (
            f"TensorStep({self.step}, rank {self.rank}, {len(self)} microbatches, "
            f"{self.global_valid_tokens} valid tokens in all)"
        )


ABOUT = (
    "step",
    "rank",
    "global_valid_tokens",
    "global_samples",
    "plan_digest",
    "stage",
    "expected_microbatches",
    "served_by",
)


def about(step: Step) -> dict[str, Any]:
    """Return the attributes of a step by the names in ``ABOUT``."""
    return {name: getattr(step, name) for name in ABOUT[:-1]} | {
        "served_by": getattr(step, "served_by", step.rank)
    }


def slots_of(step: Step) -> Sequence[Mapping[str, np.ndarray]]:
    """Return the microbatches of the encoder exchanges; empty in a job without images."""
    found: Sequence[Mapping[str, np.ndarray]] = getattr(step, "encoder", ())
    return found


def why_missing(microbatch: Mapping[str, Any]) -> str:
    """Return the reason why a microbatch has no tokens, for error texts; empty if it has some."""
    if "cu_seqlens" in microbatch:
        return ""
    try:
        microbatch["tokens"]
    except KeyError as fault:
        return str(fault.args[0]).removeprefix("'tokens' ")
    return ""


def detached_contents(microbatch: Mapping[str, Any]) -> Callable[[], Contents]:
    """Return a function for the samples that does not keep the memory of the step alive."""
    if not isinstance(microbatch, Microbatch):
        return lambda: Contents.of(microbatch)
    info = microbatch.info
    # The bytes of the real state are in the same memory as the arrays.
    info = replace(info, after=EncodedState(info.step + 1, np.zeros(0, np.uint8)))
    names = ("cu_seqlens_padded", "group_ids", "cu_seqlens")
    kept = {name: np.array(microbatch[name]) for name in names if name in microbatch}
    if "attention_mask" in microbatch:
        kept["attention_mask"] = np.zeros((0, 0), bool)  # the key marks the padded layout
    small = Microbatch(kept, info, np.arange(len(info)))
    return lambda: Contents.of(small)
