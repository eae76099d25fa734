"""``overlord.torch`` gives its names when they are asked for, and says what to install where torch
is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import overlord.torch as ot

SRC = Path(__file__).resolve().parents[2] / "src"


def run(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_it_costs_nothing():
    assert (
        run(
            "import sys, overlord.torch; print([m for m in ('torch', 'numpy') if m in sys.modules])"
        )
        == "[]"
    )


def test_without_torch_it_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\nimport overlord.torch as ot\ntry: "
        "ot.tensors\nexcept ImportError as e: print(e)"
    )
    assert run(code) == "overlord.torch.tensor_step needs torch: pip install 'overlord-data[torch]'"


def test_every_name_can_be_had():
    pytest.importorskip("torch")
    assert [name for name in ot.__all__ if getattr(ot, name, None) is None] == []
    assert sorted(ot.__all__) == dir(ot)
    with pytest.raises(AttributeError, match="no attribute 'tensor'"):
        _ = ot.tensor


def test_a_name_is_not_hidden_by_the_module_it_lives_in():
    """A submodule that is imported becomes an attribute of its package, under its own name."""
    pytest.importorskip("torch")
    modules = {path.stem for path in (SRC / "overlord" / "torch").glob("*.py")} - {"__init__"}
    assert modules & set(ot.__all__) == set()
