"""What people change in mid-run. Each event names its step; a state keeps those that still matter, not the history."""

from __future__ import annotations

from collections.abc import Sequence

from overlord.messages import SetMixture, Skip

Event = SetMixture | Skip


def last_step(event: Event) -> int:
    """The last step at which an event does something new: behind it, it is folded into the state or forgotten."""
    return event.at if isinstance(event, SetMixture) else max(event.steps, default=-1)


def latest(events: Sequence[Event], after: int, step: int) -> list[SetMixture]:
    """The change of mixture that holds at a step, of those behind ``after``: that of the latest step, the last said of equals."""
    changes = [e for e in events if isinstance(e, SetMixture) and after < e.at <= step]
    return sorted(changes, key=lambda e: e.at)[-1:]


def still_in_force(events: Sequence[Event], step: int, mix_step: int) -> tuple[Event, ...]:
    """The folded log behind a step: the mixture in force and what is still to come.

    Under ``mix_every="epoch"`` the mixture in force is that of ``mix_step``, and a later one waits for the next epoch.
    """
    return (*latest(events, -1, mix_step), *latest(events, mix_step, step), *(e for e in events if last_step(e) > step))
