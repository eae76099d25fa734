"""The rows of the README's "Measured" table, those against Overlord first.

There are at most eight rows, each with one claim and one number. A row may have alternatives: the
first whose cells the newest pages hold is used. Remove the later ones once it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from measured.pages import NUMBER, Cell, NotThere, Page, newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claim and its number: a cell, or that cell over another one of the same page."""

    claim: str
    cell: Cell
    over: Cell | None = None
    unit: str = "x"
    above: float = 0.0  # below this the claim does not hold, and must be written anew
    settings: tuple[str, ...] = ()  # words of the page that say what the claim's other numbers are

    def value(self, known: list[Page]) -> tuple[Page, str]:
        page, number = newest(self.cell, known)
        if self.over is None:
            return page, number
        other, below = newest(self.over, known)
        if other != page:
            raise NotThere(
                f"{self.claim!r}: its numbers are of {page.path.name} and "
                f"{other.path.name}; measure both in one run"
            )
        return page, f"{float(number) / float(below):.2f}"

    def check(self, known: list[Page]) -> None:
        """Raise if the number contradicts the claim, or the page lacks a number of the claim."""
        page, number = self.value(known)
        if float(number) <= self.above:
            raise NotThere(
                f"{self.claim!r}: expected more than {self.above:g}, got {number} on "
                f"{page.path.name}; write the claim anew"
            )
        named = [
            *self.cell.where.values(),
            *(self.over.where.values() if self.over else ()),
            *self.settings,
            self.cell.machine,
        ]
        absent = [words for words in self.settings if words not in page.text]
        unknown = sorted(
            set(NUMBER.findall(self.claim))
            - {number for words in named for number in NUMBER.findall(words)}
        )
        if absent or unknown:
            raise NotThere(
                f"{self.claim!r}: {page.path.name} does not hold {[*absent, *unknown]}; "
                "name the words in settings"
            )

    def line(self, known: list[Page]) -> str:
        self.check(known)
        page, number = self.value(known)
        return (
            f"| {self.claim} | {number} {self.unit} | "
            f"[{page.order[0]}](benchmarks/results/{page.path.name}) |"
        )


SIXTEEN, GPU = "16 cores", "H200"


def _memory_of(setting: str, machine: str) -> Cell:
    where = {
        "loader": "process",
        "shuffle": "on",
        "sources": "300",
        "ranks": "8",
        "setting": setting,
    }
    return Cell(
        program="memory.py",
        machine=machine,
        where=where,
        column="x less than torch",
        heading="Compared",
    )


def _throughput(loader: str, column: str, heading: str, sources: str = "100", at: int = 0) -> Cell:
    where = {"sources": sources, "loader": loader}
    return Cell(
        program="throughput.py", machine=SIXTEEN, where=where, column=column, heading=heading, at=at
    )


def _cpu(job: str, loader: str, column: str, sources: str) -> Cell:
    where = {"job": job, "sources": sources, "loader": loader}
    return Cell(
        program="throughput.py", machine=SIXTEEN, where=where, column=column, heading="Throughput"
    )


def _hosts(hosts: str, machine: str) -> Cell:
    where = {"loader": f"process, {hosts} hosts", "sources": "300", "ranks": "2"}
    return Cell(program="memory.py", machine=machine, where=where, column="MB", heading="Figure 15")


def _scaling(loader: str) -> Cell:
    return Cell(
        program="scaling.py",
        machine=SIXTEEN,
        where={"loader": loader, "hosts or workers": "16"},
        column="Mtok/s",
    )


ROWS: Sequence[Sequence[Row]] = (
    (
        Row(
            claim="**Against us:** in one process, token ids from 100 sources cost more CPU "
            "than with torchdata.nodes",
            cell=_cpu("null", "overlord", "CPU s/Mtok", "100"),
            over=_cpu("null", "nodes", "CPU s/Mtok", "100"),
            above=1.0,
        ),
        Row(
            claim="**Against us:** in one process, token ids from 100 sources cost more CPU "
            "than with torchdata.nodes",
            cell=_throughput("overlord", "CPU s/Mtok", "Null job"),
            over=_throughput("nodes", "CPU s/Mtok", "Null job"),
            above=1.0,
        ),
    ),
    (
        Row(
            claim="**Against us:** tokenizing 100 sources in processes, for 8 trainers, costs "
            "more CPU than a bare loop",
            cell=_cpu("tokenized", "overlord-process", "x bare", "100"),
            settings=("8 ranks",),
            above=1.0,
        ),
    ),
    (
        Row(
            claim="**Against us:** two loader hosts take more memory than one (300 sources); "
            "the paper's Figure 15 found the opposite",
            cell=_hosts("2", SIXTEEN),
            over=_hosts("1", SIXTEEN),
            settings=("(Figure 15)",),
            above=1.0,
        ),
    ),
    (
        Row(
            claim="Less memory than a DataLoader in each of 8 ranks: 300 sources, shuffled, "
            "each at its smallest setting that keeps pace",
            cell=_memory_of("smallest that keeps pace", SIXTEEN),
            above=1.0,
        ),
    ),
    (
        Row(
            claim="Faster tokenizing than a DataLoader, 16 loader processes against 16 workers",
            cell=_scaling("overlord-process"),
            over=_scaling("torch"),
            above=1.0,
        ),
    ),
    (
        Row(
            claim="Faster steps than token packing: ranks run one after another on one H200, "
            "context 16k",
            cell=Cell(
                program="gpu/plans.py",
                machine=GPU,
                column="x packed",
                where={"context": "16k", "samples a rank": "16", "plan": "balanced, fitted"},
            ),
            above=1.0,
        ),
    ),
    (
        Row(
            claim="Longest wait for a step while 8 of 64 loader processes are killed at once "
            "(prefetch 4, steps of 0.3 s)",
            cell=Cell(
                program="faults.py",
                machine=SIXTEEN,
                column="longest",
                where={"run": "8 loaders killed, read again", "prefetch": "4"},
            ),
            unit="ms",
            settings=("64 loaders", "a trainer step of 0.3 s"),
        ),
    ),
    (
        Row(
            claim="CPU time to plan a step of 262,144 samples on 4,096 ranks",
            cell=Cell(
                program="planning.py",
                machine=SIXTEEN,
                column="16-core Intel Xeon, best / median",
                at=1,
                where={"samples -> ranks": "262,144 -> 4,096"},
            ),
            unit="ms",
        ),
    ),
)


def shown(known: list[Page]) -> list[Row]:
    """Return the first alternative of every row that the pages hold."""
    return [_first(alternatives, known) for alternatives in ROWS]


def _first(alternatives: Sequence[Row], known: list[Page]) -> Row:
    missing = []
    for row in alternatives:
        try:
            row.value(known)
        except NotThere as reason:
            missing.append(str(reason))
        else:
            return row
    raise NotThere("\n".join(missing))
