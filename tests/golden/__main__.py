"""``python -m tests.golden [stream | plans]`` writes ``stream.json`` and ``plans.json`` anew, or
one of them.

Only when the stream or the plans are meant to change, and the changelog says so.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.golden import jobs, plans

wanted = sys.argv[1:] or ["stream", "plans"]
if "stream" in wanted:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["OVERLORD_CACHE"] = str(Path(scratch) / "cache")
        jobs.write(Path(scratch))
    print(f"wrote {jobs.FILE}")
if "plans" in wanted:
    plans.write()
    print(f"wrote {plans.FILE}")
