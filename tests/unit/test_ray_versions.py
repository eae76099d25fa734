"""Versions of Ray that are used, used with a warning, or refused. Code, metadata and documentation
name the same versions.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import overlord as ov
from overlord.ray.versions import RANGE, TESTED, check_version, minor
from tests import ray_versions
from tests.internals import RAY_VERSIONS_WARNED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", [*TESTED, "2.58.0", "2.60.3"])
def test_a_tested_minor_version_is_used_without_a_word(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(version)
    assert caplog.text == ""


@pytest.mark.parametrize("version", ["2.52.1", "1.13.0", "unknown"])
def test_a_version_that_is_known_to_break_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(
        ov.JobError,
        match=rf"expected Ray 2\.53 to 2\.60, got {version}; pip install 'overlord-data\[ray\]'",
    ):
        check_version(version)


def test_a_version_that_was_not_tested_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    RAY_VERSIONS_WARNED.replace(monkeypatch, set())
    for version in ("2.61.0", "2.61.0", "3.0.0.dev0"):
        check_version(version)
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(" was")[0] for line in said] == ["Ray 2.61.0", "Ray 3.0.0.dev0"]
    assert (
        "was not tested with this package: expected 2.53 to 2.60. If something breaks, "
        "pip install 'overlord-data[ray]'" in said[0]
    )


def test_the_extra_and_the_page_have_the_tested_versions_and_tests_run_with_the_newest() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["ray"] == [RANGE]
    assert f"ray=={TESTED[-1]}" in extras["test"]
    rows = ray_versions.known((ROOT / "docs" / "ray.md").read_text())
    assert sorted(rows, key=minor) == list(TESTED), "make ray-versions"
    assert [row for row in rows.values() if "failed" in row or "exit code" in row] == []
    assert [minor(v) for v in TESTED] == [
        (2, n) for n in range(minor(TESTED[0])[1], minor(TESTED[-1])[1] + 1)
    ], "none is left out"


def test_a_table_is_written_newest_first_and_rows_of_other_versions_stay() -> None:
    page = f"before\n{ray_versions.table({})}\nafter\n"
    rows = {v: f"| {v} | 2026-11-18 | 3.11.7 | 15 passed | passed |" for v in ("2.9.0", "2.60.0")}
    page = ray_versions.written(page, rows)
    assert ray_versions.known(page) == rows
    assert page.index("2.60.0") < page.index("2.9.0") < page.index("after")
    assert ray_versions.told(0, "=== 14 passed, 1 skipped in 9.87s ===") == "14 passed, 1 skipped"
    assert ray_versions.told(1, "1 failed, 14 passed in 176.07s") == "1 failed, 14 passed"
    assert ray_versions.told(3, "Killed") == "exit code 3"
