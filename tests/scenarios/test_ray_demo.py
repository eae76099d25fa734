"""``make demo RUNTIME=ray``: workers are killed during the run, and the stream is that of an
undisturbed run.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from overlord.demo.run import run_demo
from tests import rays
from tests.scenarios.test_demo import STEPS, TINY

pytestmark = rays.by_make_ray("half a minute")


def test_the_demonstration_on_ray_loses_workers_and_no_sample(tmp_path: Path) -> None:
    screen = io.StringIO()
    run_demo(
        tmp_path,
        TINY,
        STEPS,
        Console(file=screen, width=200),
        "overlord demo --tiny",
        compute_s=0.0,
        runtime="ray",
    )
    said = " ".join(screen.getvalue().split())
    assert re.search(
        r"[1-9]\d* kills?, 0 samples lost, 0 repeated, digest equal to the undisturbed run", said
    ), said
