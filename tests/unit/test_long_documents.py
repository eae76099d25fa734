"""Documents longer than the context: by default no token is lost, and what a job chooses to lose is
counted for every source.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import SourceError
from overlord.observe.metrics import losses
from overlord.planning.losses import DataLosses
from tests.reference import reference_stream
from tests.worlds import Rows

CONTEXT = 8
LENGTHS = {
    "web": [3, 20, 8, 9, 1, 40, 7, 2, 16, 5, 30, 4],
    "code": [4, 6, 2, 11, 8, 3],
}  # tokens of each document
MANY = {"web": [1 + 7 * k % 23 for k in range(90)], "code": [1 + 5 * k % 11 for k in range(60)]}


def job(lengths: dict[str, list[int]] | None = None, **fields: Any) -> ov.Job:
    made = {
        name: Rows([{"n": k, "tokens": [1000 * i + k + 1] * n} for k, n in enumerate(found)])
        for i, (name, found) in enumerate((lengths or LENGTHS).items())
    }
    sources = [
        ov.Source(name, rows, transforms=[ov.Tokens("tokens")], epochs=1)
        for name, rows in made.items()
    ]
    given: dict[str, Any] = {
        "batch": ov.Batch(samples=4, context=CONTEXT),
        "slice_rows": 5,
        "shuffle_chunks": 2,
        "seed": 3,
        **fields,
    }
    return ov.Job(name="long", sources=sources, **given)


def delivered(made: ov.Job, **options: Any) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """Tokens by source that a trainer got, and the metrics of the sources at the end."""
    tokens = dict.fromkeys(made.names, 0)
    with ov.launch(made, **options) as session:
        for step in session.client(0):
            for mb in step:
                for piece in mb.samples:
                    tokens[piece.sample.source] += piece.length
        return tokens, session.metrics()["sources"]


def test_by_default_every_token_of_a_long_document_is_delivered(tmp_path: Path) -> None:
    made = job()
    assert made.on_long == "split"
    tokens, metrics = delivered(made)
    assert tokens == {name: sum(found) for name, found in LENGTHS.items()}
    assert all(
        (m["cut"], m["cut_tokens"], m["dropped"], m["dropped_tokens"]) == (0, 0, 0, 0)
        for m in metrics.values()
    )
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: x\nsources: {a: {uri: a.jsonl, transforms: [tokens]}}\nbatch: {samples: "
        "2, context: 8}\n"
    )
    assert ov.Job.from_yaml(path).on_long == "split"


@pytest.mark.parametrize("where", ["this process", "a worker process"])
@pytest.mark.parametrize("on_long", ["truncate", "drop", "quarantine"])
def test_every_token_that_is_not_delivered_is_counted_for_its_source(
    on_long: str, where: str
) -> None:
    made = job(on_long=on_long)
    if where == "a worker process":
        made = replace(
            made,
            sources=[replace(s, transforms=[ov.Map(same, holds_lock=True)]) for s in made.sources],
        )
    tokens, metrics = delivered(made)
    for name in made.names:
        long = [n for n in LENGTHS[name] if n > CONTEXT]
        cut, dropped = (
            ((len(long), sum(long) - CONTEXT * len(long)) if on_long == "truncate" else (0, 0)),
            (0, 0),
        )
        if on_long == "drop":
            dropped = len(long), sum(long)
        m = metrics[name]
        assert ((m["cut"], m["cut_tokens"]), (m["dropped"], m["dropped_tokens"])) == (cut, dropped)
        refused = sum(long) if on_long == "quarantine" else 0
        assert tokens[name] + m["cut_tokens"] + m["dropped_tokens"] + refused == sum(LENGTHS[name])
        assert m["quarantined"] == (len(long) if on_long == "quarantine" else 0), (
            "a dropped document is no failure"
        )


def same(columns: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": columns["tokens"]}


@pytest.mark.parametrize("look_ahead", [1, 3])
@pytest.mark.parametrize("on_long", ["truncate", "drop"])
def test_losses_in_a_state_depend_on_the_stream_alone_and_go_on_after_a_resume(
    on_long: str, look_ahead: int
) -> None:
    made = job(MANY, on_long=on_long, look_ahead=look_ahead)
    ways = [
        ov.simulate(made, seed=s, loaders=dict.fromkeys(made.names, n), prefetch=p, save=True)
        for s, n, p in ((1, 1, 1), (2, 3, 6), (3, 2, 2))
    ]
    counts = [[run.states[step]["counts"] for step in sorted(run.states)] for run in ways]
    assert counts[0][-1]["lost_tokens"].keys() == {"web", "code"}
    assert counts[1] == counts[2] == counts[0]
    for step in (0, 4, 11):
        again = ov.simulate(
            made, seed=9, resume=json.loads(json.dumps(ways[0].states[step])), save=True
        )
        assert {k: s["counts"] for k, s in again.states.items()} == {
            k: s["counts"] for k, s in ways[0].states.items() if k > step
        }


@pytest.mark.parametrize("on_long", ["truncate", "drop"])
def test_losses_are_those_of_the_reference(on_long: str) -> None:
    made = job(MANY, on_long=on_long, until=9)
    long: dict[str, list[int]] = {}
    steps = list(reference_stream(made, long=long))
    assert len(steps) == 9
    [*_, last] = ov.simulate(made, seed=5, save=True).states.values()
    assert last["counts"]["long"] == {name: len(lost) for name, lost in long.items()}
    assert last["counts"]["lost_tokens"] == {name: sum(lost) for name, lost in long.items()}


def test_an_epoch_of_dropped_documents_alone_names_on_long_and_the_remedy() -> None:
    run = ov.simulate(job({"web": [9, 10, 11]}, on_long="drop"))
    assert isinstance(run.error, SourceError)
    assert "longer than max_document (on_long='drop'; 3 documents)" in str(run.error)
    assert "raise the context or max_document, or let on_long split long documents" in str(
        run.error
    )


def test_a_source_whose_last_documents_are_dropped_ends_and_the_others_go_on() -> None:
    tokens, metrics = delivered(job({"web": [3, 4, 20, 30], "code": [2] * 20}, on_long="drop"))
    assert tokens == {"web": 7, "code": 40}
    assert (metrics["web"]["dropped"], metrics["web"]["dropped_tokens"]) == (2, 50)


def test_a_job_that_loses_many_tokens_warns_once_of_each_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "overlord"):
        delivered(job(on_long="truncate"))
    said = sorted(r.getMessage() for r in caplog.records if "on_long" in r.getMessage())
    assert [words.split(": ")[1] for words in said] == ["source 'code'", "source 'web'"]
    assert "on_long='truncate' has cut " in said[0]
    assert "on_long='split' keeps all tokens" in said[0]


@pytest.mark.parametrize("on_long", ["split", "quarantine"])
def test_a_job_that_drops_nothing_does_not_warn(
    on_long: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "overlord"):
        delivered(job(on_long=on_long))
    assert not [r for r in caplog.records if "on_long" in r.getMessage()]


def test_a_source_is_found_when_its_losses_pass_a_hundredth_and_once() -> None:
    watch = DataLosses()
    assert watch.newly_exceeding({"tokens": np.array([1, 2])}) == [], (
        "a state of before there were such counts"
    )
    assert (
        watch.newly_exceeding({"tokens": np.array([990, 100]), "lost_tokens": np.array([10, 0])})
        == []
    ), "one of a hundred"
    assert watch.newly_exceeding(
        {"tokens": np.array([1990, 100]), "lost_tokens": np.array([21, 50])}
    ) == [0, 1]
    assert (
        watch.newly_exceeding({"tokens": np.array([2000, 100]), "lost_tokens": np.array([900, 90])})
        == []
    )


def test_hundreds_of_sources_that_lose_tokens_make_a_few_warnings() -> None:
    sources = 300
    many = job({f"s{i:03}": [2, 3] for i in range(sources)}, on_long="truncate")
    watch, said = DataLosses(), list[str]()
    for over in range(1, sources + 1):  # one source more after each step
        lost = np.where(np.arange(sources) < over, 50, 0)
        lost[0] = 99
        said += watch.warnings({"tokens": np.full(sources, 100), "lost_tokens": lost}, many)
    assert said[0].startswith("source 's000': on_long='truncate' has cut 99 of 199 tokens")
    grouped = [re.search(r"of (\d+) sources, largest shares: 's\d{3}' 33\.3%, 's", t) for t in said]
    assert [found is None for found in grouped] == sorted(found is None for found in grouped)[::-1]
    named = sum(1 if found is None else int(found[1]) for found in grouped)
    assert sources * 4 // 5 <= named <= sources, "the last ones wait for more"
    assert len(said) < 30
    worst = np.full(sources, 50)
    worst[[7, 70, 270]] = 900, 500, 700
    (text,) = DataLosses().warnings({"tokens": np.full(sources, 100), "lost_tokens": worst}, many)
    assert (
        "cut tokens of 300 sources, largest shares: 's007' 90.0%, 's270' 87.5%, 's070' 83.3%"
        in text
    )


@pytest.mark.parametrize(
    ("on_long", "wanted"),
    [("truncate", (2, 5, 70, 0)), ("drop", (7, 0, 0, 70)), ("split", (2, 0, 0, 0))],
)
def test_filtered_rows_and_dropped_documents_are_dropped_rows(
    on_long: str, wanted: tuple[int, ...]
) -> None:
    long, lost = (0, 0) if on_long == "split" else (5, 70)
    assert tuple(losses(2, long, lost, on_long).values()) == wanted


def test_a_dropped_document_is_explained() -> None:
    made = job({"web": [3, 20, 4]}, on_long="drop")
    made = replace(made, sources=[replace(made.sources[0], shuffle=False)])
    with ov.launch(made) as session:
        list(session.client(0))
        found: Any = session.explain("web/e0/f0/r1")
    assert found.status == "no sample"
    assert "a filter or on_long dropped the row" in found.words
