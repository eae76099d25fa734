"""Run the script of a page in this process, which may launch others of the same command.

python -m tests.trainers.script_alone docs/trainers/lightning.md 2
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.trainers.script_world import on_ranks, run_script, script_of

if __name__ == "__main__":
    page = Path(sys.argv[1]).resolve()
    run_script(on_ranks(script_of(page), int(sys.argv[2])), page)
