"""Scripts of pages on trainers that the test environment has: one stream, one loss, and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.script_checks import LIMIT_S, run_alone, run_page

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_huggingface(tmp_path: Path) -> None:
    run_page(
        "huggingface.md", tmp_path, loaded=("transformers.models.llama", "transformers.trainer")
    )


@pytest.mark.parametrize("page", ["ddp.md", "fsdp2.md"])
def test_torch(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_accelerate(tmp_path: Path) -> None:
    run_page("accelerate.md", tmp_path, loaded=("accelerate",))


def test_lightning(tmp_path: Path) -> None:
    run_page("lightning.md", tmp_path, loaded=("lightning.pytorch",))
    run_alone("lightning.md", tmp_path, ranks=2)
