"""What is told of a source whose readers say nothing: no figure that people count through may be
missing for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import overlord as ov
from overlord.cluster.placement import Placement
from overlord.cluster.status import StatusReporter
from tests.internals import running_job, runtime_of, unanswered_row
from tests.worlds import Rows


@pytest.fixture
def running(tmp_path: Path) -> ov.Session:
    (tmp_path / "web.jsonl").write_text(
        "".join(json.dumps({"tokens": [k] * 3}) + "\n" for k in range(40))
    )
    sources = [
        ov.Source("web", str(tmp_path / "web.jsonl"), transforms=[ov.Tokens("tokens")], epochs=1),
        ov.Source(
            "list",
            Rows([{"tokens": [k]} for k in range(40)]),
            transforms=[ov.Tokens("tokens")],
            epochs=1,
        ),
    ]
    made = ov.Job(
        name="told",
        sources=sources,
        batch=ov.Batch(samples=4, context=16),
        place=ov.ClientPlaceTree(dp=1),
        seed=1,
    )
    return ov.launch(made)


def silent(loader: int, source: str) -> dict[str, Any]:
    """The row of a loader whose worker does not answer."""
    worker = SimpleNamespace(name="loader-worker/0", handle=SimpleNamespace(pid=1), lost="")
    pool: Any = SimpleNamespace(loaders={0: worker})
    placement = Placement([1] * (loader + 1), [0] * (loader + 1))
    nothing: Any = None
    reporter = StatusReporter(pool, placement, nothing, nothing, lambda: [source] * (loader + 1))
    return unanswered_row(reporter, loader)


def test_a_loader_whose_worker_does_not_answer_has_every_figure_that_others_have(
    running: ov.Session,
) -> None:
    with running:
        next(running.client(0))
        for row in running_job(running).metrics()["loaders"]:
            assert set(silent(row["loader"], row["source"])) == set(row)


def test_a_source_of_which_nobody_tells_has_every_figure_at_nothing(
    running: ov.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running:
        next(running.client(0))
        told, figures = running.metrics()["sources"], runtime_of(running).metrics
        assert {name: {"storage", "store"} & set(row) for name, row in told.items()} == {
            "web": {"storage"},
            "list": set(),
        }

        def untold() -> dict[str, Any]:
            found = figures()
            return found | {
                "loaders": [silent(row["loader"], row["source"]) for row in found["loaders"]]
            }

        monkeypatch.setattr(runtime_of(running), "metrics", untold)
        found = running.metrics()["sources"]
    assert {name: set(row) for name, row in found.items()} == {
        name: set(row) for name, row in told.items()
    }
    assert found["web"]["storage"] == {"retries": 0, "errors": {}, "waited_s": 0.0, "given_up": 0}
