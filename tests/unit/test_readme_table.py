"""The README's "Measured" table, cell by cell: each number is that of the newest result page which
has its row.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import page as results_page
import readme
from measured.pages import Cell, NotThere, Page, newest, pages, program_of, tagged
from measured.rows import ROWS, shown

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LAST_DAY = "2026-11-18"
LINE = re.compile(
    r"^\| (?P<claim>[^|]+) \| (?P<number>[\d.]+) (?P<unit>x|ms|MB) "
    r"\| \[[\d-]+\]\((?P<link>[^)]+)\) \|$"
)
SCALING = Cell(
    program="scaling.py",
    machine="16 cores",
    where={"loader": "torch", "hosts or workers": "16"},
    column="Mtok/s",
)


def measured_section() -> str:
    return (
        (ROOT / "README.md").read_text(encoding="utf-8").split("## Measured\n")[1].split("\n## ")[0]
    )


def lines() -> list[re.Match[str]]:
    rows = [line for line in measured_section().splitlines() if line.startswith("|")][2:]
    found = [LINE.match(row) for row in rows]
    assert None not in found, (
        f"expected a claim, one number and a link in every row, got {rows[found.index(None)]!r}"
    )
    return [line for line in found if line is not None]


def test_the_table_has_at_most_eight_rows_with_one_number_each_those_against_us_first() -> None:
    against = [line["claim"].startswith("**Against us:**") for line in lines()]
    assert 1 <= len(against) <= 8
    assert any(against)
    assert against == sorted(against, reverse=True)


def cell_on(path: Path, cell: Cell) -> float:
    """The number of a cell, read again from the page's text: heading, head, row, column."""
    section, head = "", []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [part.strip() for part in line.strip().strip("|").split("|")]
        if line.startswith("#"):
            section = line
        elif not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif cell.heading in section and {*cell.where, cell.column} <= set(head):
            row = dict(zip(head, cells, strict=False))
            found += [row[cell.column]] * all(
                row[column] == wanted for column, wanted in cell.where.items()
            )
    assert len(found) == 1, (path.name, cell)
    return float(re.findall(r"[\d,.]*\d", found[0])[cell.at].replace(",", ""))


def test_every_number_is_the_cell_of_its_row_and_column_on_the_linked_page() -> None:
    rows = shown(pages())
    assert len(rows) == len(lines())
    for line, row in zip(lines(), rows, strict=True):
        path = ROOT / line["link"]
        wanted = cell_on(path, row.cell) / (cell_on(path, row.over) if row.over else 1.0)
        assert line["claim"] == row.claim
        assert float(line["number"]) == pytest.approx(wanted, abs=0.005), line["claim"]


def test_every_linked_page_is_the_newest_that_has_the_row() -> None:
    known = pages()
    for line, row in zip(lines(), shown(known), strict=True):
        assert newest(row.cell, known)[0].path == (ROOT / line["link"]).resolve()
        row.check(known)


def test_the_section_holds_no_other_figure() -> None:
    text = "\n".join(line for line in measured_section().splitlines() if not line.startswith("|"))
    assert re.findall(r"\d+\.\d+|\d+ (?:MB|ms|s|x)\b", re.sub(r"\]\([^)]*\)", "]", text)) == []


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the pages up to a fixed day, whose cells the tests change. Later pages do not
    change these tests.
    """
    for path in RESULTS.glob("*.md"):
        if path.name[:10] <= LAST_DAY:
            shutil.copy(path, tmp_path / path.name)
    return tmp_path


def test_the_readme_has_the_table_of_the_pages() -> None:
    assert readme.table(pages()) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_newer_page_makes_the_table_stale(copied: Path) -> None:
    before = readme.table(pages(copied))
    text = (copied / "2026-11-16-scaling-slices.md").read_text(encoding="utf-8")
    text = text.replace("run: 2026-11-16.2", "run: 2026-11-16.3").replace(
        "| 3.42 | 7.56 |", "| 4.00 | 7.56 |"
    )
    (copied / "2026-11-16-scaling-again.md").write_text(text, encoding="utf-8")
    assert "2026-11-16-scaling-again.md" not in before
    assert "2026-11-16-scaling-again.md" in readme.table(pages(copied))


def test_a_number_that_contradicts_its_claim_is_refused(copied: Path) -> None:
    path = copied / "2026-11-18-memory-16-cores.md"
    text = path.read_text(encoding="utf-8")
    assert text.count("| 1116 | 1729 |") == 1
    path.write_text(text.replace("| 1116 | 1729 |", "| 2000 | 1729 |"), encoding="utf-8")
    with pytest.raises(
        NotThere,
        match=r"expected more than 1, got 0\.59 on 2026-11-18-memory-16-cores\.md; "
        "write the claim anew",
    ):
        readme.table(pages(copied))


def test_a_number_of_the_claim_that_the_page_does_not_hold_is_refused() -> None:
    row = replace(shown(pages())[1], claim="in processes, 100 sources and 9 trainers")
    with pytest.raises(NotThere, match=r"does not hold \['9'\]"):
        row.check(pages())


def test_starred_and_computed_cells_may_not_be_quoted() -> None:
    for text in ("* 0.89 (0.72 to 1.03)", "22571 (by slope)", "failed", ""):
        with pytest.raises(NotThere, match="expected a measured number"):
            SCALING.number(text)
    assert SCALING.number("1,234.5 (1.0 to 2.0)") == "1234.5"
    assert replace(SCALING, at=1).number("110 / 119") == "119"


def test_the_first_alternative_that_was_measured_is_shown(copied: Path) -> None:
    preferred, before = ROWS[0][0], shown(pages(copied))[0]
    head = "| job | sources | loader | CPU s/Mtok |\n|---|---|---|---|\n"
    cells = "| null | 100 | overlord | 0.9 |\n| null | 100 | nodes | 0.2 |\n"
    tag = "<!-- made by: throughput.py; on: 16 cores; run: 2026-11-18.9 -->"
    text = f"# Throughput\n\n{tag}\n\n{head}{cells}"
    (copied / "2026-11-18-throughput-again.md").write_text(text, encoding="utf-8")
    assert before != preferred
    assert shown(pages(copied))[0] == preferred
    assert "| 4.50 x |" in preferred.line(pages(copied))


def test_every_result_page_names_its_program_its_machine_and_its_run() -> None:
    known = pages()
    assert len(known) == len(list(RESULTS.glob("*.md"))) > 20
    for page in known:
        assert (ROOT / "benchmarks" / page.program).is_file()
        assert page.path.name.startswith(page.order[0])
        assert set(page.machines) <= {"2 cores", "16 cores", "H200"} or all(
            re.fullmatch(r"\d+ cores", m) for m in page.machines
        )
    runs = [(page.program, page.order) for page in known]
    assert len(set(runs)) == len(runs), "two pages of one program and day need an order"


def test_a_saved_page_is_tagged_and_overwrites_no_other(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text = tagged("2026-11-16-scaling", "# Scaling\n\nbody\n", "16 cores", copied)
    assert (name, text) == (
        "2026-11-16-scaling-16-cores",
        "# Scaling\n\n<!-- made by: scaling.py; on: 16 cores; run: 2026-11-16.3 -->\n\nbody\n",
    )
    (copied / f"{name}.md").write_text(text, encoding="utf-8")
    again, _ = tagged("2026-11-16-scaling", "# Scaling\n\nbody\n", "16 cores", copied)
    assert again == "2026-11-16-scaling-16-cores-run4"
    monkeypatch.setattr(results_page, "RESULTS", copied)
    path = results_page.save("2026-12-01-autoscale-14", "# Autoscale\n\nbody\n", {})
    assert Page.read(path).program == "autoscale.py"


def test_a_page_is_named_after_its_program() -> None:
    names = {
        "2026-11-16-autoscale-14": "autoscale.py",
        "2026-01-01-rank-memory": "rank_memory.py",
        "2026-01-01-gpu-plans": "gpu/plans.py",
    }
    assert {name: program_of(name) for name in names} == names
    with pytest.raises(NotThere, match="name the page after its program"):
        program_of("2026-01-01-nothing")
