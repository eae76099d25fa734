"""Run the microbatches of one pipeline stage by 1F1B, with any number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlord.errors import PlanError
from overlord.torch.hdp.ring import Group
from overlord.torch.hdp.schedule import BACKWARD, FORWARD, TRANSFER, Action, Message, actions

Forward = Callable[[Any, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The place of this rank in its column of the pipeline.

    ``number``: this stage, from 0, of ``count``. ``previous`` and ``following``: ranks in ``group``
    of the neighbours in the same column. With NCCL give another group than that of the ring:
    transfers of one group run one after another.
    """

    number: int
    count: int
    previous: int = -1
    following: int = -1
    group: Group = None

    def neighbour(self, message: Message, sends: bool) -> int:
        """Return the global rank of the peer of a message; ``sends``: this rank is the sender."""
        peer = self.following if (message.kind == FORWARD) == sends else self.previous
        return peer if self.group is None else int(dist.get_global_rank(self.group, peer))


class Pipeline:
    """One stage of a pipeline. ``run`` executes a step; it may be called for every step.

    ``forward(microbatch, received)`` returns the activations that the next stage receives; on the
    last stage, the loss. ``received`` is None on the first stage. ``shape(microbatch)`` returns the
    shape of the activations between stages; all stages of a column must return the same one.
    Activations without elements are not sent.
    """

    def __init__(
        self,
        stage: Stage,
        forward: Forward,
        shape: Callable[[Any], Sequence[int]],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self._stage, self._forward, self._shape = stage, forward, shape
        self._dtype, self._device = dtype, torch.device(device)

    def run(self, microbatches: Sequence[Any]) -> list[Tensor]:
        """Run forward and backward of all microbatches; return the losses on the last stage."""
        step = _Step(self, microbatches)
        for action in actions(self._stage.number, self._stage.count, len(microbatches)):
            step.execute(action)
        return step.finish()

    @property
    def stage(self) -> Stage:
        return self._stage

    def compute(self, microbatch: Any, received: Tensor | None) -> Tensor:
        """Return the activations or the loss of a microbatch, and check its shape and dtype."""
        made = self._forward(microbatch, received)
        last = self._stage.number == self._stage.count - 1
        wanted = () if last else tuple(self._shape(microbatch))
        if tuple(made.shape) != wanted or (not last and made.dtype != self._dtype):
            raise PlanError(
                f"pipeline stage {self._stage.number}: expected {self._dtype} of shape {wanted}, "
                f"got {made.dtype} of {tuple(made.shape)}; "
                + ("the last stage returns the loss" if last else "shape= or dtype= is wrong")
            )
        return made

    def buffer(self, microbatch: Any) -> Tensor:
        """Return uninitialized memory for a microbatch's activations, or for their gradients."""
        return torch.empty(tuple(self._shape(microbatch)), dtype=self._dtype, device=self._device)


class _Step:
    """The state of one step: activations, transfers in progress, and losses."""

    def __init__(self, pipeline: Pipeline, microbatches: Sequence[Any]):
        self._pipeline, self._microbatches = pipeline, microbatches
        self._received: dict[Message, Tensor] = {}
        self._outgoing: dict[Message, Tensor] = {}
        self._held: dict[int, tuple[Tensor | None, Tensor]] = {}  # input and output
        self._sending: list[tuple[Any, list[Tensor]]] = []
        self._losses: list[Tensor] = []

    def execute(self, action: Action) -> None:
        """Execute one action of the schedule."""
        if action.kind == TRANSFER:
            self._transfer(action)
        elif action.kind == FORWARD:
            self._compute(action.index)
        else:
            self._differentiate(action.index)

    def finish(self) -> list[Tensor]:
        """Wait for the last sends; return the losses."""
        self._sent()
        return self._losses

    def _compute(self, index: int) -> None:
        x = self._received.pop(Message(FORWARD, index), None)
        if x is not None:
            x.requires_grad_()
        y = self._pipeline.compute(self._microbatches[index], x)
        self._held[index] = x, y
        stage = self._pipeline.stage
        if stage.number == stage.count - 1:
            self._losses.append(y.detach())
        else:
            self._outgoing[Message(FORWARD, index)] = y.detach().contiguous()

    def _differentiate(self, index: int) -> None:
        x, y = self._held.pop(index)
        y.backward(self._received.pop(Message(BACKWARD, index), None))
        if x is not None:
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            self._outgoing[Message(BACKWARD, index)] = grad.contiguous()

    def _transfer(self, action: Action) -> None:
        self._sent()
        stage, sent, operations = self._pipeline.stage, list[Tensor](), []
        for message in action.receives:
            buffer = self._pipeline.buffer(self._microbatches[message.index])
            self._received[message] = buffer
            if buffer.numel():
                peer = stage.neighbour(message, sends=False)
                operations.append(dist.P2POp(dist.irecv, buffer, peer, stage.group))
        receives = len(operations)
        for message in action.sends:
            sent.append(self._outgoing.pop(message))
            if sent[-1].numel():
                peer = stage.neighbour(message, sends=True)
                operations.append(dist.P2POp(dist.isend, sent[-1], peer, stage.group))
        if not operations:
            return
        begun = dist.batch_isend_irecv(operations)
        # NCCL has one work for the batch; other backends one for each operation.
        coming = begun[:receives] if len(begun) == len(operations) else begun
        for work in coming:
            work.wait()
        self._sending = [(work, sent) for work in begun[len(coming) :]]

    def _sent(self) -> None:
        """Wait for the sends of the previous transfer, and release their memory."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []
