"""Scripts of pages on trainers that the test environment has: one stream, one loss, and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.script_checks import LIMIT_S, run_page

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_huggingface(tmp_path: Path) -> None:
    run_page(
        "huggingface.md", tmp_path, loaded=("transformers.models.llama", "transformers.trainer")
    )
