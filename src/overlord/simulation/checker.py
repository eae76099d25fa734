"""Reads the history of a run and says what is wrong with it. Knows the sources and the mesh, and nothing of how steps are planned.

Every violation is a sentence with step, rank and sample. ``tests/simulation`` shows that each kind is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from overlord.simulation.history import Event, History, Sample, Seen

BOUND_S = 120.0  # of virtual time in which the next step must come once faults have stopped
MOST = 400  # sentences: one fault may be seen in every step
FIRST_STAGE = ("tokens", "position_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What anyone who wrote the job knows."""

    rows: Sequence[Sequence[int]]  # of every shard of every source
    content: Callable[[int, int, int], list[int]]  # tokens of a row
    weights: Sequence[float]
    coords: Mapping[int, Mapping[str, int]]  # of every rank in the mesh
    steps: int
    samples: int  # of a step; 0: the batch is in tokens
    steady: bool  # weights never change
    prefixes: bool  # samples come in the order of their source's stream: no look-ahead
    longest: int


@dataclass(slots=True)
class Checker:
    """One run, against the run of the same job in which nothing happened."""

    facts: Facts
    undisturbed: Mapping[tuple[int, int], Seen]
    found: list[str] = field(default_factory=list)

    def check(self, history: History) -> list[str]:
        self.found = []
        self._order(history.events)
        delivered = [e.seen for e in history.events if e.what == "deliver" and e.seen is not None]
        self._bitwise(delivered)
        steps = self._steps(delivered)
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
        """Each trainer gets the steps it asked for, one by one; a step that was taken never comes again, but to those who went back."""
        wanted: dict[int, int] = {}
        taken: dict[int, int] = {}
        session = 0
        for e in events:
            if e.what in ("rewind", "restart"):
                session = e.session
                wanted.clear()
                taken = {rank: min(step, e.step - 1) for rank, step in taken.items()}
                self._went_back(e, taken)
            elif e.what == "begin":
                wanted[e.rank] = e.step
            elif e.what == "leave":
                taken.pop(e.rank, None)
            elif e.what == "took":
                taken[e.rank] = max(taken.get(e.rank, -1), e.step)
            elif e.what == "deliver":
                if e.session != session:
                    self._say(f"step {e.step}, rank {e.rank}: it is of session {e.session}, which was over: {session} had begun")
                if e.step != wanted.get(e.rank):
                    self._say(f"step {e.step}, rank {e.rank}: step {wanted.get(e.rank)} was wanted next")
                if e.step <= taken.get(e.rank, -1):
                    self._say(f"step {e.step}, rank {e.rank}: it was handed out again after it was taken")
                wanted[e.rank] = e.step + 1

    def _went_back(self, e: Event, taken: Mapping[int, int]) -> None:
        """A restart of the job goes on behind what all have: not a step later, or steps would be lost."""
        if e.what == "restart" and taken and e.step > min(taken.values()) + 1:
            slow = min(taken, key=lambda rank: taken[rank])
            self._say(
                f"step {e.step}, rank {slow}: the job went on there, though this rank had taken step {taken[slow]} last: steps are lost"
            )

    # content

    def _bitwise(self, delivered: Sequence[Seen]) -> None:
        for seen in delivered:
            ours = self.undisturbed.get((seen.rank, seen.step))
            if ours is None:
                self._say(f"step {seen.step}, rank {seen.rank}: the undisturbed run has no such step")
            elif ours.digest != seen.digest or ours.samples != seen.samples:
                self._say(f"step {seen.step}, rank {seen.rank}: not what the undisturbed run gives: {_difference(ours, seen)}")

    def _steps(self, delivered: Sequence[Seen]) -> dict[int, dict[int, Seen]]:
        """What each rank has of each step in the end."""
        steps: dict[int, dict[int, Seen]] = {}
        for seen in delivered:
            steps.setdefault(seen.step, {})[seen.rank] = seen
        return dict(sorted(steps.items()))

    def _groups(self, ranks: Mapping[int, Seen], *axes: str) -> Iterator[list[Seen]]:
        groups: dict[tuple[int, ...], list[Seen]] = {}
        for rank, seen in sorted(ranks.items()):
            groups.setdefault(tuple(self.facts.coords[rank][axis] for axis in axes), []).append(seen)
        yield from groups.values()

    def _peers(self, steps: Mapping[int, Mapping[int, Seen]]) -> None:
        for step, ranks in steps.items():
            for group in self._groups(ranks, "dp"):
                for other in group[1:]:
                    if other.samples != group[0].samples:
                        odd = _odd(group[0], other)
                        self._say(f"step {step}, rank {other.rank}: other samples than rank {group[0].rank} of its replica: {odd}")
            for group in self._groups(ranks, "dp", "cp", "pp"):
                held = [seen for seen in group if seen.keys]
                for other in held[1:]:
                    if other.digest != held[0].digest:
                        self._say(f"step {step}, rank {other.rank}: other bytes than its tensor-parallel peer, rank {held[0].rank}")
            for seen in ranks.values():
                if self.facts.coords[seen.rank]["pp"] > 0 and (extra := [k for k in FIRST_STAGE if k in seen.keys]):
                    self._say(f"step {step}, rank {seen.rank}: {extra[0]!r} on a later pipeline stage")

    def _tiles(self, steps: Mapping[int, Mapping[int, Seen]]) -> None:
        """The slices of a replica, joined, are its samples: every token in one place, whoever holds it."""
        content, cp = self.facts.content, 1 + max(c["cp"] for c in self.facts.coords.values())
        for step, ranks in steps.items():
            for group in self._groups(ranks, "dp"):
                first = [s for s in group if self.facts.coords[s.rank]["pp"] == 0 and any(t is not None for t in s.tokens)]
                slices = {self.facts.coords[s.rank]["cp"]: s for s in reversed(first)}
                if len(slices) < cp:
                    continue  # some left
                for m, samples in enumerate(group[0].samples):
                    held = Counter(t for s in slices.values() for t in (s.tokens[m] or ()) if t)
                    for sample in samples:
                        for token in content(sample.source, sample.file, sample.row):
                            held[token] -= 1
                    if any(held.values()):
                        token = next(t for t, n in held.items() if n)
                        self._say(
                            f"step {step}, rank {group[0].rank}, microbatch {m}: token {token} is there {held[token]:+d} times too often"
                        )

    # samples

    def _of_step(self, ranks: Mapping[int, Seen]) -> list[Sample]:
        return [sample for group in self._groups(ranks, "dp") for mb in group[0].samples for sample in mb]

    def _exactly_once(self, steps: Mapping[int, Mapping[int, Seen]]) -> None:
        replicas = {c["dp"] for c in self.facts.coords.values()}
        seen_at: dict[Sample, int] = {}
        there = [Counter[int]() for _ in self.facts.rows]
        whole = True
        for step, ranks in steps.items():
            whole = whole and {self.facts.coords[rank]["dp"] for rank in ranks} == replicas
            for sample in self._of_step(ranks):
                if sample in seen_at:
                    self._say(f"step {step}: {_name(sample)} again, after step {seen_at[sample]}")
                seen_at[sample] = step
                there[sample.source][sample.epoch] += 1
                if not (sample.file < len(self.facts.rows[sample.source]) and sample.row < self.facts.rows[sample.source][sample.file]):
                    self._say(f"step {step}: {_name(sample)} is no row of the source")
            if whole and self.facts.prefixes:
                self._no_gap(step, there)

    def _no_gap(self, step: int, there: Sequence[Counter[int]]) -> None:
        """An epoch begins when all of the one before it is out: what is delivered is a prefix of each epoch."""
        for source, epochs in enumerate(there):
            size = sum(self.facts.rows[source])
            for epoch in range(max(epochs, default=0)):
                if epochs[epoch] != size:
                    lost = size - epochs[epoch]
                    self._say(f"step {step}: epoch {epoch + 1} of source {source} has begun, and {lost} samples of epoch {epoch} are lost")

    def _mixture(self, steps: Mapping[int, Mapping[int, Seen]]) -> None:
        facts = self.facts
        if not facts.steady or not facts.prefixes or list(steps) != list(range(len(steps))):
            return
        total, sums = 0, [0] * len(facts.rows)
        replicas = {c["dp"] for c in facts.coords.values()}
        for step, ranks in steps.items():
            if {facts.coords[rank]["dp"] for rank in ranks} != replicas:
                return  # some left: what they would have had is not in the history
            for s in self._of_step(ranks):
                n = 1 if facts.samples else len(facts.content(s.source, s.file, s.row))
                sums[s.source] += n
                total += n
            for source, weight in enumerate(facts.weights):
                off = sums[source] - total * weight / sum(facts.weights)
                if abs(off) >= (1.0 if facts.samples else 2 * facts.longest) + 1e-9:
                    unit = "samples" if facts.samples else "tokens"
                    self._say(f"step {step}: source {source} has {off:+.2f} {unit} against its weight")

    # the end

    def _end(self, events: Sequence[Event]) -> None:
        """Every rank that stayed has every step, and ends behind the last one without an error."""
        left = {e.rank for e in events if e.what == "leave"}
        last: dict[int, int] = {}
        ended: dict[int, Event] = {}
        for e in events:
            if e.what in ("rewind", "restart", "begin"):
                for rank in [e.rank] if e.rank >= 0 else list(ended):
                    ended.pop(rank, None)
            if e.what == "deliver":
                last[e.rank] = e.step
            elif e.what in ("end", "error"):
                ended[e.rank] = e
        for rank in sorted(set(self.facts.coords) - left):
            end = ended.get(rank)
            if end is None:
                self._say(f"step {last.get(rank, -1) + 1}, rank {rank}: it never came, and no error was told")
            elif end.what == "error":
                self._say(f"step {last.get(rank, -1) + 1}, rank {rank}: ended with an error: {end.words}")
            elif last.get(rank, -1) != self.facts.steps - 1:
                self._say(f"step {last.get(rank, -1)}, rank {rank}: its last step, of {self.facts.steps}")

    def _liveness(self, events: Sequence[Event]) -> None:
        calm = next((e.t for e in events if e.what == "calm"), None)
        if calm is None:
            return
        gone = {e.rank for e in events if e.what in ("end", "leave") and e.t < calm}
        since = {rank: calm for rank in self.facts.coords if rank not in gone}
        for e in events:
            if e.t < calm or e.rank not in since:
                continue
            if e.what in ("deliver", "end", "leave", "error"):
                if e.t - since[e.rank] > BOUND_S:
                    self._say(
                        f"step {e.step}, rank {e.rank}: came {e.t - since[e.rank]:.1f} s after faults had stopped or the step before came"
                    )
                since[e.rank] = e.t


def _name(s: Sample) -> str:
    return f"sample (source {s.source}, epoch {s.epoch}, file {s.file}, row {s.row}, part {s.part})"


def _odd(one: Seen, other: Seen) -> str:
    """A sample that one has and the other has not."""
    ours, theirs = ([s for mb in seen.samples for s in mb] for seen in (one, other))
    missing, extra = list((Counter(ours) - Counter(theirs)).keys()), list((Counter(theirs) - Counter(ours)).keys())
    if not missing and not extra:
        return "the same samples in another order, or in other microbatches"
    said = [f"{_name(s)} is missing" for s in missing[:1]] + [f"{_name(s)} is there instead" for s in extra[:1]]
    return ", ".join(said)


def _difference(ours: Seen, seen: Seen) -> str:
    return _odd(ours, seen) if ours.samples != seen.samples else "the same samples, other bytes"
