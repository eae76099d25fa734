"""A fresh process that runs a part of a case, as its parent sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


class Child:
    """A process of a case.

    Its argument is the case as JSON; its input and output are lines of JSON.
    """

    def __init__(self, module: str, case: Any, cache: str, *more: str):
        single = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
            "OVERLORD_CACHE": cache,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(asdict(case)), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **single},
            cwd=HERE,
        )

    def say(self, value: Any = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the case ended early, with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the process; a server closes its workers when its input is closed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
