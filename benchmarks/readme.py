"""Write the README's "Measured" table from the newest result pages.

    python benchmarks/readme.py            # rewrites the table in README.md
    python benchmarks/readme.py --check    # exit code 1 if the table is not what the pages say

The rows are named in benchmarks/measured/rows.py. A new page of a benchmark changes the README by
this program alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click

from measured.pages import Page, pages
from measured.rows import shown

README = Path(__file__).resolve().parents[1] / "README.md"
HEADING = "## Measured\n"
HEAD = "| claim | measured | result page |\n|---|---|---|\n"


def table(known: list[Page]) -> str:
    return HEAD + "\n".join(row.line(known) for row in shown(known)) + "\n"


def replaced(text: str, new: str) -> str:
    """Return the README with this table under its heading."""
    before, heading, after = text.partition(HEADING)
    lines = after.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return before + heading + "".join(lines[:first]) + new + "".join(lines[last:])


@click.command(help=__doc__.split("\n")[0])
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if the table is stale.")
def main(check: bool) -> None:
    text = README.read_text(encoding="utf-8")
    wanted = replaced(text, table(pages()))
    if not check:
        README.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        raise click.ClickException(
            "README.md: expected the table of the newest result pages, got another one; "
            "run benchmarks/readme.py"
        )


if __name__ == "__main__":
    main()
