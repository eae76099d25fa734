"""Reads the history of a run and says what is wrong with it. Knows the sources and the mesh, and
nothing of how steps are planned.

Every violation is a sentence with step, rank and sample. ``tests/simulation`` shows that each kind
is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.simulation.world.history import Event, History, Sample, Seen

BOUND_S = 120.0  # of virtual time in which the next step must come once faults have stopped
MOST = 400  # sentences: one fault may be seen in every step
MOVES = ("rewind", "restart", "reshard")  # a session is over, another begins
FIRST_STAGE = ("tokens", "position_ids")


Coords = Mapping[int, Mapping[str, int]]  # of every rank in a mesh
References = Mapping[
    str, Mapping[tuple[int, int], Seen]
]  # by mesh: what (rank, step) of it should see


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What anyone who wrote the job knows."""

    rows: Sequence[Sequence[int]]  # of every shard of every source
    content: Callable[[int, int, int], list[int]]  # tokens of a row
    weights: Sequence[float]
    mesh: str  # that the job begins with
    places: Mapping[str, Coords]  # of the meshes it may have
    steps: int
    samples: int  # of a step; 0: the batch is in tokens
    steady: bool  # weights never change
    prefixes: bool  # samples come in the order of their source's stream: no look-ahead
    longest: int
    skipped: Collection[int] = ()  # steps that people had left out: no rank is handed them


class Held(NamedTuple):
    """What the ranks have of a step, and where they stood in the mesh when they were handed it."""

    mesh: str
    coords: Coords
    ranks: dict[int, Seen]

    @property
    def whole(self) -> bool:
        """No replica is missing: none left."""
        return {self.coords[rank]["dp"] for rank in self.ranks} == {
            c["dp"] for c in self.coords.values()
        }

    def groups(self, *axes: str) -> Iterator[list[Seen]]:
        groups: dict[tuple[int, ...], list[Seen]] = {}
        for rank, seen in sorted(self.ranks.items()):
            groups.setdefault(tuple(self.coords[rank][axis] for axis in axes), []).append(seen)
        yield from groups.values()

    def samples(self) -> list[Sample]:
        return [sample for group in self.groups("dp") for mb in group[0].samples for sample in mb]


@dataclass(slots=True)
class Checker:
    """One run, against runs of the same job in which nothing happened."""

    facts: Facts
    undisturbed: References
    found: list[str] = field(default_factory=list)

    def check(self, history: History) -> list[str]:
        self.found = []
        self._order(history.events)
        delivered = list(self._delivered(history.events))
        self._bitwise(delivered)
        steps = self._steps(delivered)
        self._meshes(steps)
        self._peers(steps)
        self._tiles(steps)
        self._exactly_once(steps)
        self._mixture(steps)
        self._end(history.events)
        self._liveness(history.events)
        return self.found

    def _say(self, words: str) -> None:
        if len(self.found) < MOST:
            self.found.append(words)

    # order: what one rank sees

    def _order(self, events: Sequence[Event]) -> None:
        """Each trainer gets the steps it asked for, one by one; a step that was taken never comes
        again, but to those who went back.
        """
        wanted: dict[int, int] = {}
        taken: dict[int, int] = {}
        session = 0
        for e in events:
            if e.what in MOVES:
                session = e.session
                wanted.clear()
                self._went_on(e, taken)
                taken = {rank: min(step, e.step - 1) for rank, step in taken.items()}
                if e.what == "reshard":
                    taken = dict.fromkeys(self.facts.places[e.words], e.step - 1)
            elif e.what == "begin":
                wanted[e.rank] = self._from(e.step)
            elif e.what == "leave":
                taken.pop(e.rank, None)
            elif e.what == "took":
                taken[e.rank] = max(taken.get(e.rank, -1), e.step)
            elif e.what == "deliver":
                if e.session != session:
                    self._say(
                        f"step {e.step}, rank {e.rank}: it is of session {e.session}, "
                        f"which was over: {session} had begun"
                    )
                if e.step != wanted.get(e.rank):
                    self._say(
                        f"step {e.step}, rank {e.rank}: step {wanted.get(e.rank)} was expected next"
                    )
                if e.step <= taken.get(e.rank, -1):
                    self._say(
                        f"step {e.step}, rank {e.rank}: it was handed out again after it was taken"
                    )
                wanted[e.rank] = self._from(e.step + 1)
            elif e.what == "twice":
                self._say(f"session {e.session}: it counted twice: {e.words}")
            elif e.what == "refused":
                self._say(f"step {e.step}: what people said of it in time was refused: {e.words}")

    def _from(self, step: int) -> int:
        """The first step from here on that is delivered."""
        while step in self.facts.skipped:
            step += 1
        return step

    def _went_on(self, e: Event, taken: Mapping[int, int]) -> None:
        """A restart of the job goes on behind what all have: not a step later, or steps would be
        lost. Another mesh goes on behind what any has, and all have it.
        """
        if e.what == "reshard" and taken and e.step <= max(taken.values()):
            fast = max(taken, key=lambda rank: taken[rank])
            self._say(
                f"step {e.step}, rank {fast}: the mesh changed there, and this rank had "
                f"taken step {taken[fast]}: steps come again"
            )
        if e.what != "rewind" and taken and e.step > min(taken.values()) + 1:
            slow = min(taken, key=lambda rank: taken[rank])
            self._say(
                f"step {e.step}, rank {slow}: the job went on there, though this rank had "
                f"taken step {taken[slow]} last: steps are lost"
            )

    # content

    def _delivered(self, events: Sequence[Event]) -> Iterator[tuple[str, Seen]]:
        """Each with the mesh of that moment."""
        mesh = self.facts.mesh
        for e in events:
            if e.what == "reshard":
                mesh = e.words
            elif e.what == "deliver" and e.seen is not None:
                yield mesh, e.seen

    def _bitwise(self, delivered: Sequence[tuple[str, Seen]]) -> None:
        for mesh, seen in delivered:
            ours = self.undisturbed[mesh].get((seen.rank, seen.step))
            if ours is None:
                self._say(
                    f"step {seen.step}, rank {seen.rank}: the undisturbed run has no such step"
                )
            elif ours.digest != seen.digest or ours.samples != seen.samples:
                self._say(
                    f"step {seen.step}, rank {seen.rank}: not what the undisturbed run "
                    f"gives: {_difference(ours, seen)}"
                )

    def _steps(self, delivered: Sequence[tuple[str, Seen]]) -> dict[int, Held]:
        """What each rank has of each step in the end: of one that came again under another mesh,
        what came then.
        """
        steps: dict[int, Held] = {}
        for mesh, seen in delivered:
            if seen.step not in steps or steps[seen.step].mesh != mesh:
                steps[seen.step] = Held(mesh, self.facts.places[mesh], {})
            if seen.rank in self.facts.places[mesh]:
                steps[seen.step].ranks[seen.rank] = seen
        return dict(sorted(steps.items()))

    def _meshes(self, steps: Mapping[int, Held]) -> None:
        """Under whatever mesh, a step has the samples it would have had without a change of it."""
        first, coords = self.undisturbed[self.facts.mesh], self.facts.places[self.facts.mesh]
        for step, held in steps.items():
            if held.mesh == self.facts.mesh or not held.whole:
                continue
            ours = Held(
                self.facts.mesh,
                coords,
                {rank: first[rank, step] for rank in coords if (rank, step) in first},
            )
            if odd := sorted((Counter(ours.samples()) - Counter(held.samples())).keys()):
                self._say(
                    f"step {step}, under {held.mesh}: {_name(odd[0])} is missing, which "
                    f"it has under {self.facts.mesh}"
                )

    def _peers(self, steps: Mapping[int, Held]) -> None:
        for step, held_by in steps.items():
            ranks, coords = held_by.ranks, held_by.coords
            for group in held_by.groups("dp"):
                for other in group[1:]:
                    if other.samples != group[0].samples:
                        odd = _odd(group[0], other)
                        self._say(
                            f"step {step}, rank {other.rank}: other samples than rank "
                            f"{group[0].rank} of its replica: {odd}"
                        )
            for group in held_by.groups("dp", "cp", "pp"):
                held = [seen for seen in group if seen.keys]
                for other in held[1:]:
                    if other.digest != held[0].digest:
                        self._say(
                            f"step {step}, rank {other.rank}: other bytes than its "
                            f"tensor-parallel peer, rank {held[0].rank}"
                        )
            for seen in ranks.values():
                if coords[seen.rank]["pp"] > 0 and (
                    extra := [k for k in FIRST_STAGE if k in seen.keys]
                ):
                    self._say(
                        f"step {step}, rank {seen.rank}: {extra[0]!r} on a later pipeline stage"
                    )

    def _tiles(self, steps: Mapping[int, Held]) -> None:
        """The slices of a replica, joined, are its samples: every token in one place, whoever holds
        it.
        """
        content = self.facts.content
        for step, held_by in steps.items():
            coords = held_by.coords
            for group in held_by.groups("dp"):
                first = [
                    s
                    for s in group
                    if coords[s.rank]["pp"] == 0 and any(t is not None for t in s.tokens)
                ]
                slices = {coords[s.rank]["cp"]: s for s in reversed(first)}
                if len(slices) < 1 + max(c["cp"] for c in coords.values()):
                    continue  # some left
                for m, samples in enumerate(group[0].samples):
                    held = Counter(t for s in slices.values() for t in (s.tokens[m] or ()) if t)
                    for sample in samples:
                        for token in content(sample.source, sample.file, sample.row):
                            held[token] -= 1
                    if any(held.values()):
                        token = next(t for t, n in held.items() if n)
                        self._say(
                            f"step {step}, rank {group[0].rank}, microbatch {m}: token "
                            f"{token} is there {held[token]:+d} times too often"
                        )

    # samples

    def _exactly_once(self, steps: Mapping[int, Held]) -> None:
        seen_at: dict[Sample, int] = {}
        there = [Counter[int]() for _ in self.facts.rows]
        whole = True
        for step, held in steps.items():
            whole = (
                whole and held.whole and not any(skipped < step for skipped in self.facts.skipped)
            )  # what those had is not seen
            for sample in held.samples():
                if sample in seen_at:
                    self._say(f"step {step}: {_name(sample)} again, after step {seen_at[sample]}")
                seen_at[sample] = step
                there[sample.source][sample.epoch] += 1
                if not (
                    sample.file < len(self.facts.rows[sample.source])
                    and sample.row < self.facts.rows[sample.source][sample.file]
                ):
                    self._say(f"step {step}: {_name(sample)} is no row of the source")
            if whole and self.facts.prefixes:
                self._no_gap(step, there)

    def _no_gap(self, step: int, there: Sequence[Counter[int]]) -> None:
        """An epoch begins when all of the one before it is out: what is delivered is a prefix of
        each epoch.
        """
        for source, epochs in enumerate(there):
            size = sum(self.facts.rows[source])
            for epoch in range(max(epochs, default=0)):
                if epochs[epoch] != size:
                    lost = size - epochs[epoch]
                    self._say(
                        f"step {step}: epoch {epoch + 1} of source {source} has begun, "
                        f"and {lost} samples of epoch {epoch} are lost"
                    )

    def _mixture(self, steps: Mapping[int, Held]) -> None:
        facts = self.facts
        if not facts.steady or not facts.prefixes or list(steps) != list(range(len(steps))):
            return
        total, sums = 0, [0] * len(facts.rows)
        for step, held in steps.items():
            if not held.whole:
                return  # some left: what they would have had is not in the history
            for s in held.samples():
                n = 1 if facts.samples else len(facts.content(s.source, s.file, s.row))
                sums[s.source] += n
                total += n
            for source, weight in enumerate(facts.weights):
                off = sums[source] - total * weight / sum(facts.weights)
                if abs(off) >= (1.0 if facts.samples else 2 * facts.longest) + 1e-9:
                    unit = "samples" if facts.samples else "tokens"
                    self._say(
                        f"step {step}: source {source} has {off:+.2f} {unit} against its weight"
                    )

    # the end

    def _end(self, events: Sequence[Event]) -> None:
        """Every rank that stayed has every step, and ends behind the last one without an error."""
        ranks = set(self.facts.places[self.facts.mesh])
        last: dict[int, int] = {}
        ended: dict[int, Event] = {}
        for e in events:
            if e.what == "reshard":
                ranks = set(self.facts.places[e.words])
            elif e.what == "leave":
                ranks.discard(e.rank)
            if e.what in (*MOVES, "begin"):
                for rank in [e.rank] if e.rank >= 0 else list(ended):
                    ended.pop(rank, None)
            if e.what == "deliver":
                last[e.rank] = e.step
            elif e.what in ("end", "error"):
                ended[e.rank] = e
        for rank in sorted(ranks):
            end = ended.get(rank)
            if end is None:
                self._say(
                    f"step {last.get(rank, -1) + 1}, rank {rank}: it never came, and no "
                    "error was told"
                )
            elif end.what == "error":
                self._say(
                    f"step {last.get(rank, -1) + 1}, rank {rank}: ended with an error: {end.words}"
                )
            elif last.get(rank, -1) != self.facts.steps - 1:
                self._say(
                    f"step {last.get(rank, -1)}, rank {rank}: its last step, of {self.facts.steps}"
                )

    def _liveness(self, events: Sequence[Event]) -> None:
        calm = next((e.t for e in events if e.what == "calm"), None)
        if calm is None:
            return
        there = dict.fromkeys(self.facts.places[self.facts.mesh])
        for e in events:
            if e.t < calm and e.what == "reshard":
                there = dict.fromkeys(self.facts.places[e.words])
            elif e.t < calm and e.what in ("end", "leave"):
                there.pop(e.rank, None)
        since = dict.fromkeys(there, calm)
        for e in events:
            if e.t >= calm and e.what == "reshard":
                since = {rank: since.get(rank, e.t) for rank in self.facts.places[e.words]}
            if e.t < calm or e.rank not in since:
                continue
            if e.what in ("deliver", "end", "leave", "error"):
                if e.t - since[e.rank] > BOUND_S:
                    self._say(
                        f"step {e.step}, rank {e.rank}: came {e.t - since[e.rank]:.1f} s "
                        "after faults had stopped or the step before came"
                    )
                since[e.rank] = e.t


def _name(s: Sample) -> str:
    return f"sample (source {s.source}, epoch {s.epoch}, file {s.file}, row {s.row}, part {s.part})"


def _odd(one: Seen, other: Seen) -> str:
    """A sample that one has and the other has not."""
    ours, theirs = ([s for mb in seen.samples for s in mb] for seen in (one, other))
    missing, extra = (
        list((Counter(ours) - Counter(theirs)).keys()),
        list((Counter(theirs) - Counter(ours)).keys()),
    )
    if not missing and not extra:
        return "the same samples in another order, or in other microbatches"
    said = [f"{_name(s)} is missing" for s in missing[:1]] + [
        f"{_name(s)} is there instead" for s in extra[:1]
    ]
    return ", ".join(said)


def _difference(ours: Seen, seen: Seen) -> str:
    return _odd(ours, seen) if ours.samples != seen.samples else "the same samples, other bytes"
