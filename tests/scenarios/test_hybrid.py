"""Documents that rings of ranks share, on every runtime: each rank gets exactly its pieces, and all
pieces together are the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import JobError
from overlord.planning.strategies import hdp
from tests.reference_pieces import reference_microbatches
from tests.scenarios.test_runtime import RUNTIMES, Outcome, all_clean, run, wanted
from tests.sizes import on_runtimes
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)
CONTEXT = 24


def rows(n: int, first: int) -> Rows:
    """Mostly short documents; every fifth is longer than a rank, and some than the whole pool."""
    lengths = [1 + k % 7 if k % 5 else 20 + (k * 37) % 110 for k in range(n)]
    return Rows(
        [
            {"n": first + k, "tokens": [(first + 13 * k + j) % 60_000 for j in range(length)]}
            for k, length in enumerate(lengths)
        ]
    )


@dataclass(frozen=True)
class Case:
    place: ov.Mesh
    strategy: Any = "hdp_balance"
    batch: dict[str, Any] = field(default_factory=dict)
    sync: str = "microbatch"

    def job(self, **changes: Any) -> ov.Job:
        settings: dict[str, Any] = {
            "name": "hybrid",
            "sources": [
                ov.Source(
                    name, rows(n, 10_000 * i), transforms=[ov.Tokens("tokens")], epochs=1, weight=w
                )
                for i, (name, n, w) in enumerate((("a", 60, 1.0), ("b", 90, 2.0)))
            ],
            "batch": ov.Batch(**{"samples": 15, "context": CONTEXT, **self.batch}),
            "place": self.place,
            "strategy": self.strategy,
            "sync": self.sync,
            "seed": 11,
            "slice_rows": 8,
            "shuffle_chunks": 2,
        }
        return ov.Job(**{**settings, **changes})


CASES = {
    "any ring": Case(ov.Mesh(dp=4)),
    "any ring, free counts": Case(ov.Mesh(dp=5), sync="step"),
    "dp and cp are one axis": Case(ov.Mesh(dp=2, cp=2, order=("pp", "cp", "dp", "tp"))),
    "powers of two": Case(ov.Mesh(dp=4), hdp(groups="power_of_two"), sync="step"),
    "padded pieces": Case(
        ov.Mesh(dp=3), hdp(padded=True), {"pad_multiple": 3, "pad_id": 5, "labels": "unshifted"}
    ),
    "stages": Case(ov.Mesh(pp=2, dp=3), hdp(count_multiple=2, virtual=2), sync="step"),
    "tensor parallelism": Case(ov.Mesh(pp=2, dp=2, cp=2, tp=2), sync="step"),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def whole_documents(out: Outcome) -> dict[int, list[Any]]:
    """The samples of every step, put together from the pieces of all ranks."""
    found: dict[int, dict[Any, dict[int, int]]] = {}
    for rank_steps in out.microbatches.values():
        for step, held in rank_steps.items():
            for mb in held:
                if "tokens" not in mb.arrays:
                    continue
                local = mb.arrays["cu_seqlens_local"].tolist()
                tokens, position = (mb.arrays[k] for k in ("tokens", "position_ids"))
                for (a, b), piece in zip(pairwise(local), mb.samples, strict=False):
                    places = found.setdefault(step, {}).setdefault(tuple(piece.sample), {})
                    for token, k in zip(tokens[a:b].tolist(), position[a:b].tolist(), strict=True):
                        if k < piece.length:
                            assert places.setdefault(k, token) == token
    for samples in found.values():
        assert all(sorted(places) == list(range(len(places))) for places in samples.values())
    return {
        step: sorted((key, [places[k] for k in sorted(places)]) for key, places in samples.items())
        for step, samples in found.items()
    }


@pytest.mark.parametrize(
    ("runtime", "case"), on_runtimes(CASES, RUNTIMES, ("any ring", "tensor parallelism"))
)
def test_pieces_of_all_ranks_are_the_stream(runtime: str, case: Case) -> None:
    made = case.job()
    out = run(runtime, made)
    all_clean(out)
    assert whole_documents(out) == wanted(made)
    assert out.digests() == run("simulated" if runtime == "local" else "local", made).digests(), (
        "to the byte"
    )
    assert out.plans or runtime == "simulated"
    long = [p.tasks.table.sizes().max() for p in out.plans.values() if p.tasks is not None]
    assert not out.plans or max(long) > 2, "some document had several ranks"


@pytest.mark.parametrize("runtime", ["local", "process"])
@cases
def test_each_rank_gets_what_the_reference_says(runtime: str, case: Case) -> None:
    made = case.job(until=4)
    out, place = run(runtime, made), case.place
    all_clean(out)
    texts = {step: dict(found) for step, found in wanted(made).items()}
    stage = place.along("pp")
    for step, plan in out.plans.items():
        documents = [texts[step][tuple(plan.sample_id(i))] for i in range(len(plan))]
        bytes_of: dict[int, int] = {}
        for bucket, ranks in enumerate(place.buckets("CP")):
            told = reference_microbatches(
                plan, documents, bucket, pad_id=made.batch.pad_id, labels=made.batch.labels
            )
            for rank in ranks:
                held = out.microbatches[rank][step]
                assert len(held) == len(told)
                for mb, expected in zip(held, told, strict=True):
                    got = {k: v.reshape(-1).tolist() for k, v in mb.arrays.items()}
                    keys = got.keys() if place.pp > 1 or place.tp > 1 else expected.keys()
                    assert got == {k: expected[k] for k in keys}
                if any(mb.arrays for mb in held):
                    bytes_of[rank] = sum(a.nbytes for mb in held for a in mb.arrays.values())
                    first = stage[rank] == 0
                    assert all(("tokens" in mb.arrays) == first for mb in held)
        assert plan.delivery(made.batch)["bytes_by_client"] == bytes_of


RESUMED = ("dp and cp are one axis", "powers of two", "padded pieces")


@pytest.mark.parametrize(
    ("runtime", "name"),
    on_runtimes(dict(zip(RESUMED, RESUMED, strict=True)), RUNTIMES, ("powers of two",)),
)
def test_a_run_goes_on_under_another_mesh_with_the_same_samples(runtime: str, name: str) -> None:
    """Its longest document is that of the saved run, although the default depends on the mesh."""
    made = CASES["any ring"].job()
    limit = made.document_limit
    state = ov.simulate(made, steps=3, save=True).states[2]
    other = CASES[name].place
    ranks = other.dp * other.cp
    bigger = replace(other, dp=4) if ranks < 4 else other
    out = run(runtime, replace(made, place=bigger), resume=state)
    all_clean(out)
    assert whole_documents(out) == {s: found for s, found in wanted(made).items() if s >= 3}
    assert max(len(d) for found in whole_documents(out).values() for _, d in found) == limit


def test_a_state_of_one_rank_keeps_its_context_as_the_limit_on_many() -> None:
    alone = replace(CASES["any ring"].job(), place=ov.Mesh())
    state = ov.simulate(alone, steps=3, save=True).states[2]
    out = run("local", CASES["any ring"].job(), resume=state)
    all_clean(out)
    assert whole_documents(out) == {s: found for s, found in wanted(alone).items() if s >= 3}
    with ov.launch(CASES["any ring"].job()) as session:
        client = session.client(0)
        next(client)
        session.load_state_dict(state)
        assert session.job.document_limit == CONTEXT


def test_a_mesh_that_cannot_hold_the_longest_document_of_a_state_is_refused() -> None:
    made = CASES["any ring"].job()
    state = ov.simulate(made, steps=2, save=True).states[1]
    with pytest.raises(JobError, match=r"max_document: expected at most 48, the context of 2"):
        ov.launch(replace(made, place=ov.Mesh(dp=2)), resume=state)
    with (
        ov.launch(made) as session,
        pytest.raises(JobError, match=r"max_document: expected at most 48"),
    ):
        session.reshard(ov.Mesh(dp=2))


@pytest.mark.parametrize("runtime", ["local", "process", "ray"])
def test_the_mesh_changes_in_mid_run(runtime: str) -> None:
    made = CASES["any ring"].job()
    out = Outcome()
    with ov.launch(made, runtime=runtime, check=True) as session:
        clients = [session.client(r) for r in range(4)]
        for _ in range(3):
            for client in clients:
                out.put(client.rank, next(client))
        place = ov.Mesh(dp=3, cp=2)
        assert session.reshard(place) == 3
        clients = [session.client(r) for r in range(place.world_size)]
        for steps in zip(*clients, strict=True):
            for client, step in zip(clients, steps, strict=True):
                out.put(client.rank, step)
    assert whole_documents(out) == wanted(made)


def test_ranks_wait_at_every_microbatch_only_if_all_have_as_many() -> None:
    for name, equal in (("any ring", True), ("any ring, free counts", False)):
        out = run("local", CASES[name].job(until=5))
        counts = {
            step: {len(steps[step]) for steps in out.microbatches.values()} for step in range(5)
        }
        assert all(len(found) == 1 for found in counts.values()) == equal


def test_a_shorter_longest_document_is_asked_for_and_cut_there() -> None:
    made = CASES["any ring"].job(max_document=30)
    out = run("local", made)
    assert whole_documents(out) == wanted(made)
    lengths = [len(d) for found in whole_documents(out).values() for _, d in found]
    assert max(lengths) == 30 > CONTEXT


def test_what_cannot_be_shared_is_refused_at_once() -> None:
    case = CASES["any ring"]
    for changes, problem in (
        ({"max_document": 97}, "max_document: expected at most 96, the context of 4 ranks, got 97"),
        ({"max_document": 0}, "max_document: expected a whole number of at least 1, got 0"),
        (
            {"max_document": 81, "strategy": hdp(capacity=21)},
            "max_document: expected at most 80, the capacity of 4 ranks, got 81",
        ),
        (
            {"batch": ov.Batch(samples=15, context=CONTEXT, cp_split="contiguous")},
            "batch.cp_split: expected \"zigzag\" with samples that ranks share, got 'contiguous'",
        ),
        ({"overflow": "defer"}, 'overflow: expected "grow" with samples that ranks share'),
        (
            {"batch": ov.Batch(samples=4, context=23)},
            r"batch\.context: expected a multiple of 2 with samples that ranks share",
        ),
        (
            {"batch": ov.Batch(samples=4, context=24, layout="padded")},
            r'batch\.layout: expected "packed" with samples that ranks share',
        ),
        (
            {"hooks": [ov.constructor_do_plan(lambda assembly: assembly.default())]},
            "hooks: expected no constructor_do_plan with samples that ranks share",
        ),
        (
            {"strategy": "llm_balance", "max_document": 48},
            r"max_document: expected at most batch\.context=24 with strategy 'llm_balance'",
        ),
    ):
        with pytest.raises(JobError, match=problem):
            case.job(**changes)


def test_no_array_of_a_step_is_writable_and_scalars_are_scalars() -> None:
    out = ov.launch(CASES["any ring"].job())
    with out as session:
        step = next(session.client(0))
        for mb in step:
            assert all(not np.asarray(a).flags.writeable for a in mb.values())
            assert [mb[k].shape for k in ("cp_rank", "local_cp_size", "offload")] == [()] * 3
