"""Scripts of pages on trainers with environments of their own: ``make trainers`` runs them.

Each environment has one of these trainers; the tests of others are skipped in it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.trainers.script_checks import LIMIT_S, run_page

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def needs(module: str) -> pytest.MarkDecorator:
    """Skip a test where a trainer is not installed."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


@needs("trl")
def test_trl(tmp_path: Path) -> None:
    run_page("trl.md", tmp_path, loaded=("transformers.models.llama", "trl.trainer.sft_trainer"))


@needs("megatron")
def test_megatron(tmp_path: Path) -> None:
    """TP 2, PP 2 and DP 2."""
    run_page("megatron.md", tmp_path, worlds=(8,), loaded=("tests.trainers.megatron_on_cpu",))


@needs("deepspeed")
def test_deepspeed(tmp_path: Path) -> None:
    """It reduces no gradients of float64."""
    loaded = ("tests.trainers.deepspeed_on_cpu",)
    run_page("deepspeed.md", tmp_path, loaded=loaded, dtype="float32")


@needs("torchtitan")
def test_torchtitan(tmp_path: Path) -> None:
    """Its first weights depend on the number of ranks."""
    loaded = ("tests.trainers.torchtitan_on_cpu",)
    run_page("torchtitan.md", tmp_path, loaded=loaded, one_start=False)
