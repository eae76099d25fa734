"""The guard of the null job: what it reads, what fails, and what is not compared."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import guard

CONDITIONS = {"python": "3.11.7", "numpy": "2.4.6", "pyarrow": "26.0.1"}
OLD = guard.Figures(
    counts={"instructions": 1_000_000, "misses": 20_000}, tokens=10_000, conditions=CONDITIONS
)
ROOT = Path(__file__).resolve().parents[2]


OUTPUT = """==31== Command: python D1 misses: 7
==31==
==31== I   refs:      5,885,280,859
==31== I1  misses:            1,234
==31== D   refs:      3,118,412,055  (2,000,000,000 rd   + 1,118,412,055 wr)
==31== D1  misses:      114,412,055  (   90,000,000 rd   +    24,412,055 wr)
==31== D1  miss rate:           3.7% (          4.5%     +           2.2%  )
"""


def new(instructions: int = 1_000_000, misses: int = 20_000) -> guard.Figures:
    return replace(OLD, counts={"instructions": instructions, "misses": misses})


def test_the_counts_are_read_from_the_output_of_valgrind() -> None:
    assert guard.counts_in(OUTPUT) == {"instructions": 5_885_280_859, "misses": 114_412_055}


def test_output_without_a_count_is_refused_with_its_last_line() -> None:
    with pytest.raises(ValueError, match="expected a line with instructions, got 'Killed'"):
        guard.counts_in("==31== Command: python\nKilled\n")
    with pytest.raises(ValueError, match="expected a line with misses, got '==31== I1 "):
        guard.counts_in("\n".join(OUTPUT.splitlines()[:4]))
    with pytest.raises(ValueError, match="got 'nothing'"):
        guard.counts_in("")


@pytest.mark.parametrize(
    ("counts", "failed"),
    [
        ((1_000_000, 20_000), False),
        ((1_050_000, 21_000), False),
        ((1_050_001, 20_000), True),
        ((1_000_000, 21_001), True),
        ((900_000, 22_000), True),
        ((500_000, 10_000), False),
    ],
)
def test_growth_of_either_count_beyond_five_per_cent_fails(
    counts: tuple[int, int], failed: bool
) -> None:
    assert guard.compare(OLD, new(*counts)).failed is failed


def test_the_verdict_has_all_figures_the_growth_and_the_remedy() -> None:
    text = guard.compare(OLD, new(1_100_000)).text
    assert "expected growth of at most 5%, got" in text
    assert "110.000 instructions a token, +10.00% from 100.000" in text
    assert "2.000 misses a token, +0.00% from 2.000" in text
    assert "--update" in text


def test_a_large_improvement_passes_and_asks_for_the_new_figures() -> None:
    assert "--update" in guard.compare(OLD, new(900_000)).text
    assert "--update" not in guard.compare(OLD, new(990_000)).text


def test_a_job_of_other_tokens_is_never_compared() -> None:
    with pytest.raises(ValueError, match="expected 10000, got 9999"):
        guard.compare(OLD, replace(OLD, tokens=9_999))


def test_other_versions_are_named_and_not_compared() -> None:
    assert guard.not_compared(CONDITIONS, dict(CONDITIONS)) is None
    reason = guard.not_compared(CONDITIONS, {**CONDITIONS, "numpy": "2.5.0", "libc": "musl"})
    assert reason is not None
    assert "numpy: 2.4.6, here 2.5.0; libc: none, here musl" in reason
    assert "python" not in reason
    assert "--against OLD" in reason


def test_figures_are_read_as_they_were_written() -> None:
    assert guard.read_figures(guard.written(OLD)) == OLD


def test_the_stored_figures_are_those_of_the_present_job() -> None:
    stored = guard.read_figures(guard.STORED.read_text(encoding="utf-8"))
    assert set(stored.counts) == set(guard.COUNTED)
    assert min(stored.counts.values()) > 0
    assert stored.conditions["steps"] == f"{guard.STEPS[0]} and {guard.STEPS[1]}"
    assert stored.conditions["job"] == hashlib.sha256(guard.JOB.read_bytes()).hexdigest()[:12], (
        "benchmarks/guarding/null_job.py has changed: run benchmarks/guard.py --update"
    )


def test_a_machine_without_valgrind_gets_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(guard.main, [])
    assert result.exit_code == 1
    assert "valgrind: expected it on the PATH, got none" in result.output
    assert "apt install valgrind" in result.output


def test_the_job_takes_the_same_tokens_in_every_run(tmp_path: Path) -> None:
    first, _ = guard.run_job([], 2, ROOT / "src", tmp_path)
    second, _ = guard.run_job([], 2, ROOT / "src", tmp_path)
    assert first == second > 0
