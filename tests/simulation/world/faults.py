"""What goes wrong: each fault a plain line of a script, drawn by the seed, with the moment it
strikes and whom.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

# A fault, and the roles it may strike.
KINDS: dict[str, tuple[str, ...]] = {
    "kill": ("loader", "constructor", "planner"),
    "kill several": ("loader", "constructor"),
    "stop": (
        "loader",
        "constructor",
        "planner",
    ),  # SIGSTOP; it wakes later, perhaps when another has its place
    "cut off": (
        "loader",
        "constructor",
        "planner",
        "trainer",
    ),  # alive, but nothing comes from it or gets to it for a while
    "cut link": ("loader", "constructor", "trainer"),  # one wire of it
    "slow link": ("loader", "constructor", "trainer"),
    "slow disk": ("loader",),
    "torn write": ("planner",),  # it dies in the middle of a write to the journal
    "disk full": ("planner",),
    "restart": ("trainer", "job"),
    "rewind": ("job",),
    "reshard": (
        "job",
    ),  # trainers stop behind a step and go on as another mesh: ranks leave, ranks join
    "scale": ("job",),  # a source is read in more workers, or in fewer, from here on
    "leave": ("trainer",),
    "slow trainer": ("trainer",),
    "bad start": (
        "loader",
        "constructor",
        "planner",
    ),  # one is killed, and those that are started in its place die while they start
    "slow start": (
        "loader",
        "constructor",
        "planner",
    ),  # the same, but the next takes long: it opens many sources, say
}
LEAST = 3  # that strike in every run
NEEDS_JOURNAL = ("planner", "job")  # roles that come back from what is written


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes when every rank has taken ``step`` and ``after_s`` have passed, or ``patience_s``
    after the one before it.
    """

    kind: str
    role: str
    step: int
    after_s: float
    patience_s: float
    seconds: float  # how long it lasts
    which: int  # of those of the role, by number
    factor: float = 1.0

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        return (
            f"behind step {self.step} + {self.after_s * 1000:.0f} ms: {self.kind}, "
            f"{self.role} {self.which}{lasts}"
        )


# With what overlaps; so that seeds which failed before there were such faults draw what they drew
# then.
DRAWN_APART = ("reshard", "scale", "bad start", "slow start")


def draw_faults(r: random.Random, steps: int, *, journal: bool) -> tuple[Fault, ...]:
    """Some classes of faults, and between 3 and 8 of them, over the first two thirds of the run."""
    kinds = {k: roles for k, roles in KINDS.items() if k not in DRAWN_APART}
    every = [
        (k, role)
        for k, roles in kinds.items()
        for role in roles
        if journal or role not in NEEDS_JOURNAL or k == "rewind"
    ]
    classes = r.sample(every, r.randint(1, 5))
    n = r.randint(LEAST, 8)
    at = sorted(r.randint(-1, steps * 2 // 3) for _ in range(n))
    return tuple(_fault(r, r.choice(classes), step) for step in at)


def draw_reshards(r: random.Random, steps: int, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The script with one to three changes of the mesh among its faults."""
    more = [
        _fault(r, ("reshard", "job"), r.randint(0, steps * 2 // 3))
        for _ in range(r.choice((1, 1, 2, 3)))
    ]
    return tuple(sorted((*faults, *more), key=lambda fault: fault.step))


def draw_scales(r: random.Random, steps: int, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The script with one to four changes of how many workers read a source; some workers die while
    they take over.
    """
    more = []
    for step in (r.randint(0, steps * 2 // 3) for _ in range(r.choice((1, 2, 3, 4)))):
        more.append(_fault(r, ("scale", "job"), step))
        if r.random() < 0.4:
            kill = _fault(r, ("kill", "loader"), step)
            which = r.choice((kill.which, -1))  # the last is the newest, if there is one
            more.append(replace(kill, after_s=r.random() * 0.15, which=which))
    return tuple(sorted((*faults, *more), key=lambda fault: fault.step))


def draw_overlaps(r: random.Random, steps: int, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The script with loader workers that die while the links of others are slow. Where standbys
    take their place, others send payload for the steps that are under way than before, and what was
    sent before comes later than the plans that are made then.
    """
    more = []
    for step in (r.randint(0, steps * 2 // 3) for _ in range(2)):
        slow, kill = (_fault(r, (kind, "loader"), step) for kind in ("slow link", "kill"))
        more += [
            replace(slow, seconds=r.uniform(1.0, 2.0), factor=50.0, after_s=0.0, patience_s=0.05),
            replace(kill, after_s=r.random() * 0.1),
        ]
    return tuple(sorted((*faults, *more), key=lambda fault: fault.step))


def draw_births(
    r: random.Random,
    steps: int,
    faults: tuple[Fault, ...],
    *,
    journal: bool,
    moves: tuple[str, ...],
) -> tuple[Fault, ...]:
    """The script with parts that die while they start, or start slowly, and with sessions that are
    moved among it: there all parts start at once. What follows a move strikes while nothing is
    settled yet.
    """
    roles = [role for role in KINDS["bad start"] if journal or role not in NEEDS_JOURNAL]
    more = []
    for step in (r.randint(0, steps * 2 // 3) for _ in range(r.choice((1, 2, 2, 3)))):
        birth = _fault(
            r, (r.choice(("bad start", "bad start", "slow start")), r.choice(roles)), step
        )
        if not moves or r.random() < 0.4:
            more.append(birth)
            continue
        move = replace(_fault(r, (r.choice(moves), "job"), step), patience_s=0.0)
        loss = _fault(
            r,
            (
                r.choice(("kill", "kill several", "stop", "cut off")),
                r.choice(("loader", "constructor")),
            ),
            step,
        )
        before = [replace(birth, patience_s=0.0)] if r.random() < 0.6 else []
        more += [*before, move, replace(loss, after_s=r.random() * 0.3)]
    return tuple(sorted((*faults, *more), key=lambda fault: fault.step))


def draw_around(
    r: random.Random,
    steps: Sequence[int],
    faults: tuple[Fault, ...],
    *,
    journal: bool,
    moves: tuple[str, ...],
) -> tuple[Fault, ...]:
    """The script with a loss, or with a move, at about the moment when people say something, every
    other time they do: while the coordinator is being told, just before it, or when it has heard it
    and plans are about that were made without it.
    """
    losses = [
        ("kill", "loader"),
        *(
            (kind, "planner")
            for kind in ("kill", "torn write", "stop", "cut off", "disk full")
            if journal
        ),
    ]
    more = []
    for step in (step for step in steps if r.random() < 0.5):
        what = (r.choice(moves), "job") if r.random() < 0.4 else r.choice(losses)
        fault = _fault(r, what, step + r.choice((0, 0, 1)))
        more.append(replace(fault, after_s=r.choice((0.0, 0.005, 0.05)) * r.random()))
    return tuple(sorted((*faults, *more), key=lambda fault: fault.step))


def _fault(r: random.Random, what: tuple[str, str], step: int) -> Fault:
    kind, role = what
    lasts = kind in (
        "stop",
        "cut off",
        "cut link",
        "slow link",
        "slow disk",
        "slow trainer",
        "disk full",
        "slow start",
    )
    return Fault(
        kind,
        role,
        step,
        after_s=r.choice((0.0, r.random() * 0.02, r.random() * 0.2)),
        patience_s=r.choice((0.05, 0.5, 3.0)),
        seconds=r.choice((0.05, 0.5, 2.0, 8.0)) * r.uniform(0.5, 1.5) if lasts else 0.0,
        which=r.randrange(12),
        factor=r.choice((5.0, 50.0)),
    )
