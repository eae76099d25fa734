"""1F1B: the order of forwards, backwards and transfers of one pipeline stage. Pure.

Columns of a pipeline may run different numbers of microbatches. A microbatch that several columns
share has the same index in each. Then the shared forwards and backwards have one order in all
columns, whatever their counts are, so ranks cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from overlord.errors import PlanError

FORWARD, BACKWARD, TRANSFER = "forward", "backward", "transfer"


@dataclass(frozen=True, slots=True)
class Message:
    """An activation or a gradient between neighbouring stages."""

    kind: str  # FORWARD: activations, to the next stage; BACKWARD: gradients, to the previous one
    index: int  # microbatch


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a stage: compute, or exchange messages in one batch."""

    kind: str  # FORWARD, BACKWARD or TRANSFER
    index: int = -1  # microbatch of a computation
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


def computations(stage: int, stages: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield the forwards and backwards of a stage, in the order of 1F1B."""
    _check(stage, stages, count)
    ahead = min(count, stages - 1 - stage)  # forwards before the first backward
    yield from ((FORWARD, i) for i in range(ahead))
    for i in range(ahead, count):
        yield FORWARD, i
        yield BACKWARD, i - ahead
    yield from ((BACKWARD, i) for i in range(count - ahead, count))


def actions(stage: int, stages: int, count: int) -> Iterator[Action]:
    """Yield the computations of a stage, and the transfers between them.

    The result of a computation is sent in one batch with the receive of the next one.
    Neighbours that send to each other at the same time therefore do not deadlock.
    """
    unsent: tuple[Message, ...] = ()
    for kind, index in computations(stage, stages, count):
        message = (Message(kind, index),)
        receives = message if (stage > 0 if kind == FORWARD else stage < stages - 1) else ()
        if unsent or receives:
            yield Action(TRANSFER, sends=unsent, receives=receives)
        yield Action(kind, index)
        unsent = message if (stage < stages - 1 if kind == FORWARD else stage > 0) else ()
    if unsent:
        yield Action(TRANSFER, sends=unsent)


def in_flight(stage: int, stages: int, count: int) -> int:
    """Return the largest number of microbatches whose activations a stage holds at once."""
    _check(stage, stages, count)
    return min(count, stages - stage)


def _check(stage: int, stages: int, count: int) -> None:
    if not 0 <= stage < stages or count < 0:
        raise PlanError(
            f"pipeline: expected a stage of 0 to {stages - 1} and a count of at least 0, got "
            f"stage {stage} and {count} microbatches"
        )
