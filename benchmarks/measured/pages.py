"""Result pages as data: the program and machine of each page, and the cells of its tables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results"
TAG = re.compile(
    r"^<!-- made by: (?P<program>[\w/]+\.py); on: (?P<machines>[^;]+); run: (?P<date>\d{4}-\d\d-\d\d)\.(?P<run>\d+) -->$",
    re.MULTILINE,
)
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")


class NotThere(LookupError):
    """A page, row or cell is missing in the results, or may not be quoted."""


@dataclass(frozen=True, slots=True)
class Table:
    heading: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def matching(self, where: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the rows with these cells, each as a mapping of column to cell."""
        if not set(where) <= set(self.head):
            return []
        rows = [dict(zip(self.head, row, strict=False)) for row in self.rows]
        return [row for row in rows if all(row[column] == cell for column, cell in where.items())]


@dataclass(frozen=True, slots=True)
class Page:
    path: Path
    program: str
    machines: tuple[str, ...]
    order: tuple[str, int]  # date, and run of that day: later pages count
    text: str

    @classmethod
    def read(cls, path: Path) -> Page:
        text = path.read_text(encoding="utf-8")
        tag = TAG.search(text)
        if tag is None:
            raise NotThere(
                f"{path.name}: expected a line '<!-- made by: ...; on: ...; run: "
                "<date>.<n> -->', got none; add it"
            )
        machines = tuple(name.strip() for name in tag["machines"].split(","))
        return cls(path, tag["program"], machines, (tag["date"], int(tag["run"])), text)

    def tables(self) -> list[Table]:
        made: list[Table] = []
        heading, lines = "", self.text.splitlines()
        for i, line in enumerate(lines):
            if line.startswith("#"):
                heading = line.lstrip("# ")
            elif (
                line.startswith("|")
                and i + 1 < len(lines)
                and re.fullmatch(r"\|[-:| ]+\|", lines[i + 1])
            ):
                rows = []
                for row in lines[i + 2 :]:
                    if not row.startswith("|"):
                        break
                    rows.append(_cells(row))
                made.append(Table(heading, _cells(line), tuple(rows)))
        return made


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The identity of a cell: program and machine of its page, cells of its row, and its column."""

    program: str
    machine: str
    where: Mapping[str, str]
    column: str
    heading: str = ""  # that the section's heading contains, where several tables have such a row
    at: int = 0  # which of the cell's numbers: 1 of "110 / 119" is 119

    def on(self, page: Page) -> str | None:
        """Return the text of the cell on this page, or None; raise if its row occurs twice."""
        found = [
            row
            for t in page.tables()
            if self.heading in t.heading and self.column in t.head
            for row in t.matching(self.where)
        ]
        if len(found) > 1:
            raise NotThere(
                f"{page.path.name}: expected one row {dict(self.where)}, got "
                f"{len(found)}; name more columns or the heading"
            )
        return found[0][self.column] if found else None

    def number(self, text: str) -> str:
        """Return the printed number of the cell; raise if it is starred, computed or missing."""
        found = NUMBER.findall(text)
        if len(found) <= self.at or text.startswith("*") or "by slope" in text:
            raise NotThere(
                f"{self.column} of {dict(self.where)}: expected a measured number, got "
                f"{text!r}; quote another row"
            )
        return str(found[self.at]).replace(",", "")


def pages(folder: Path = RESULTS) -> list[Page]:
    """Return all result pages, the newest first."""
    return sorted(
        (Page.read(path) for path in folder.glob("*.md")), key=lambda page: page.order, reverse=True
    )


def newest(cell: Cell, known: list[Page]) -> tuple[Page, str]:
    """Return the newest page of the program and machine that has the cell, and the number."""
    for page in known:
        if (
            page.program == cell.program
            and cell.machine in page.machines
            and (text := cell.on(page)) is not None
        ):
            return page, cell.number(text)
    raise NotThere(
        f"no page of {cell.program} on {cell.machine} has {cell.column!r} of "
        f"{dict(cell.where)}; run it with --save"
    )


def this_machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores"


def program_of(name: str) -> str:
    """Return the program of a page's name: ``autoscale.py`` for ``2026-11-16-autoscale-14``."""
    kind = re.sub(r"^\d{4}-\d\d-\d\d-", "", name)
    stems = {
        path.relative_to(BENCHMARKS).as_posix(): path.stem.replace("_", "-")
        for path in sorted(BENCHMARKS.glob("*.py"))
    }
    stems |= {f"gpu/{path.name}": f"gpu-{path.stem}" for path in (BENCHMARKS / "gpu").glob("*.py")}
    fitting = [
        program for program, stem in stems.items() if kind == stem or kind.startswith(f"{stem}-")
    ]
    if not fitting:
        raise NotThere(
            f"{name}: expected <date>-<program>, got no program of benchmarks/ in it; "
            "name the page after its program"
        )
    return max(fitting, key=len)


def tagged(name: str, text: str, machine: str, folder: Path = RESULTS) -> tuple[str, str]:
    """Return name and text of a new page with its tag after the title.

    The name is that of no earlier page of the day.
    """
    program, date = program_of(name), name[:10]
    same = [page for page in pages(folder) if page.program == program and page.order[0] == date]
    run = 1 + max((page.order[1] for page in same), default=0)
    title, _, rest = text.partition("\n")
    tag = f"<!-- made by: {program}; on: {machine}; run: {date}.{run} -->"
    suffix = "" if machine.replace(" ", "-") in name else f"-{machine.replace(' ', '-')}"
    unique = (
        f"{name}{suffix}"
        if not (folder / f"{name}{suffix}.md").exists()
        else f"{name}{suffix}-run{run}"
    )
    return unique, f"{title}\n\n{tag}\n\n{rest.lstrip()}"
