"""``python -m tests.golden`` writes ``stream.json`` anew: only when the stream is meant to change, and the changelog says so."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.golden.jobs import FILE, write

with tempfile.TemporaryDirectory() as scratch:
    os.environ["OVERLORD_CACHE"] = str(Path(scratch) / "cache")
    write(Path(scratch))
print(f"wrote {FILE}")
