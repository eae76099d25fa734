"""The example of FSDP2 under torchrun, as a reader would start it: two ranks, gloo, one checkpoint
for both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_train_save_and_go_on_with_the_losses_of_one_rank(tmp_path: Path):
    own = {
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(tmp_path),
        "OVERLORD_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "examples" / "12_fsdp2.py"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        cwd=tmp_path,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 rank(s), 10 steps: loss 4.1" in done.stdout
    assert "steps 5 to 9 again, from the checkpoint: same losses: True" in done.stdout
    assert [
        path.name for path in tmp_path.iterdir() if not path.name.startswith(("torch", "cache"))
    ] == []
