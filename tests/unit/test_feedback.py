"""Stories of reports: what reaches a schedule and when, what is refused, and what a state holds of
it.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import overlord as ov
from overlord.client.sent_reports import KeptReports, KnownReports, ReportSender
from overlord.errors import JobError, OverlordError, PlanError, StateMismatch
from overlord.messages.control import Report, SentReport, SetMixture, Skip
from overlord.messages.data import surely_in_time
from overlord.planning.schedule.base import learns
from tests.internals import generation_of, loop_of, running_job, runtime_of
from tests.processes import until
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)


class Listener:
    """A schedule that writes down what it is told. What it wrote is shared by all copies, for the
    test to read.
    """

    def __init__(self, heard: list[tuple[int, dict[str, float]]]):
        self.heard, self.total = heard, 0.0

    def __deepcopy__(self, memo: Any) -> Listener:
        return Listener(self.heard)

    def __call__(self, step: int, feedback: Mapping[str, float]) -> dict[str, float]:
        self.heard.append((step, dict(feedback)))
        self.total += feedback.get("loss/a", 0.0)
        return {"a": 1.0 + self.total, "b": 1.0}

    def __repr__(self) -> str:
        return "Listener"

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


def job(mixture: Any, dp: int = 1, steps: int = 24, **changes: Any) -> ov.Job:
    sources = [
        ov.Source(
            name,
            Rows([{"tokens": [k + 1] * 2} for k in range(12 + 4 * i)]),
            transforms=[ov.Tokens("tokens")],
            epochs=None,
        )
        for i, name in enumerate("ab")
    ]
    settings: dict[str, Any] = {
        "name": "feedback",
        "sources": sources,
        "batch": ov.Batch(samples=6, context=32),
        "mixture": mixture,
        "until": steps,
        "place": ov.ClientPlaceTree(dp=dp),
        "slice_rows": 4,
        "shuffle_chunks": 2,
    }
    return ov.Job(**{**settings, **changes})


def launch(made: ov.Job, **options: Any) -> ov.Session:
    return ov.launch(made, **{"check": True, "stall_limit_s": 10, **options})


def loss(step: int) -> dict[str, float]:
    return {"loss/a": 1.0 + step}


# When


@pytest.mark.parametrize("prefetch", range(1, 9))
@pytest.mark.parametrize("held", [0, 1])
def test_in_a_normal_loop_every_report_is_in_time_at_every_prefetch(
    prefetch: int, held: int
) -> None:
    """A report may come as late as while the next step is worked on; the plan it is meant for has
    it, whatever the prefetch.
    """
    heard: list[tuple[int, dict[str, float]]] = []
    lag = prefetch + 2
    with launch(job(Listener(heard), dp=2, feedback_lag=lag), prefetch=prefetch) as session:
        clients = [session.client(0), session.client(1)]
        for _ in range(24):
            for client in clients:
                step = next(client)
                if step.step >= held:
                    client.report(
                        step.step - held, {"loss/a": float(step.step - held + 10 * client.rank)}
                    )
        counts = session.metrics()["feedback"]
    assert heard == [(t, {} if t < lag else {"loss/a": t - lag + 5.0}) for t in range(24)]
    assert counts["late"] == counts["invalid"] == 0
    assert counts["received"] == 2 * (24 - held)
    assert counts["used"] == 2 * (24 - lag)


def test_ranks_in_threads_of_their_own_are_all_heard() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    with launch(job(Listener(heard), dp=3, feedback_lag=4), prefetch=2) as session:

        def train(client: ov.Client) -> None:
            for step in client:
                client.report(
                    step.step, {"loss/a": float(client.rank), "tokens/a": 1.0 + client.rank}
                )

        threads = [threading.Thread(target=train, args=(session.client(r),)) for r in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert session.metrics()["feedback"]["late"] == 0
    assert heard == [
        (t, {} if t < 4 else {"loss/a": (0 * 1 + 1 * 2 + 2 * 3) / 6, "tokens/a": 6.0})
        for t in range(24)
    ]


def test_a_late_report_is_dropped_and_counted_and_is_in_no_state() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    with launch(job(Listener(heard), feedback_lag=4), prefetch=2) as session:
        client = session.client(0)
        for _ in range(8):
            next(client)
        client.report(1, loss(1))
        client.report(7, loss(7))
        state = client.state_dict()
        assert list(state["reports"]) == ["7"]
        assert session.metrics()["feedback"] == {
            "received": 2,
            "used": 0,
            "late": 1,
            "pending": 1,
            "invalid": 0,
        }
        wanted = [step.plan_digest for step in client]
    with launch(job(Listener([]), feedback_lag=4), prefetch=1, resume=state) as session:
        assert [step.plan_digest for step in session.client(0)] == wanted
    assert (5, {}) in heard
    assert (11, loss(7)) in heard


def test_of_two_reports_of_a_rank_the_last_before_its_use_counts() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    with launch(job(Listener(heard), feedback_lag=5), prefetch=1) as session:
        client = session.client(0)
        for step in client:
            if step.step == 2:
                client.report(2, {"loss/a": 9.0, "loss/b": 9.0})
                client.report(2, loss(2))
            if step.step == 9:
                client.report(2, {"loss/a": 50.0})
    assert dict(heard)[7] == loss(2)
    assert all(not said for step, said in heard if step != 7)


def test_what_was_reported_before_steps_that_are_skipped_is_not_used_since_plans_run_ahead_of_it() -> (
    None
):
    """Skipped steps do not fill the window, so how far planning is when a trainer speaks depends on
    its pace.
    """
    heard: list[tuple[int, dict[str, float]]] = []
    digests = set()
    for seed in range(6):
        heard.clear()
        made = job(Listener(heard), dp=2, feedback_lag=6)
        run = ov.simulate(
            made,
            seed=seed,
            prefetch=1 + seed % 4,
            events=[Skip((7, 8, 9, 10))],
            report=lambda r, s: loss(s),
            save=True,
        )
        digests.add(tuple(s.plan_digest for s in run.steps[0]))
        used = {t: {} if t < 6 or 8 <= t <= 16 else loss(t - 6) for t in range(24)}
        assert dict(heard) == used
        for step in (
            4,
            6,
            11,
            12,
            14,
        ):  # a state remembers that steps were skipped for as long as it matters
            heard.clear()
            again = ov.simulate(
                made,
                seed=seed + 1,
                prefetch=4,
                resume=run.states[step],
                report=lambda r, s: loss(s),
            )
            assert [s.plan_digest for s in again.steps[0]] == [
                s.plan_digest for s in run.steps[0] if s.step > step
            ]
            assert dict(heard) == {t: said for t, said in used.items() if t > step}
    assert len(digests) == 1


# To whom


def test_a_schedule_is_asked_once_a_step_in_order_whatever_holds_up_the_draw() -> None:
    for seed in range(8):
        heard: list[tuple[int, dict[str, float]]] = []
        events = (SetMixture(3, {"b": 1.0}), SetMixture(9, {"a": 1.0, "b": 3.0}))
        ov.simulate(job(Listener(heard), dp=2), seed=seed, events=events, check=True)
        assert [step for step, _ in heard] == list(range(24))


def test_every_run_has_a_schedule_of_its_own() -> None:
    mixture = ov.schedule.odm(["a", "b"], warmup=0)
    made = job(mixture)
    runs = [
        ov.simulate(made, seed=s, report=lambda r, step: {"loss/a": 8.0, "loss/b": 1.0})
        for s in (1, 2)
    ]
    assert [s.plan_digest for s in runs[0].steps[0]] == [s.plan_digest for s in runs[1].steps[0]]
    assert mixture.state_dict()["updates"] == 0
    quiet = ov.simulate(made, seed=1)
    assert [s.plan_digest for s in quiet.steps[0]] != [s.plan_digest for s in runs[0].steps[0]]


def test_weights_by_epoch_do_not_depend_on_a_draw_that_is_tried_again() -> None:
    def turns(step: int, feedback: Any) -> dict[str, float]:
        return {"a": 1.0} if step % 5 < 3 else {"b": 1.0}

    states = set()
    for seed in range(20):
        run = ov.simulate(
            job(turns, mix_every="epoch", steps=20), seed=seed, read_ahead=1, check=True
        )
        states.add(
            json.dumps(
                [
                    (s.plan_digest, s.info.after.mix_step, s.info.after.mix_epoch)
                    for s in run.steps[0]
                ]
            )
        )
    assert len(states) == 1


def test_weights_by_epoch_learn_at_every_step_and_change_when_the_epoch_rises() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    made = job(Listener(heard), mix_every="epoch", feedback_lag=6)
    whole = ov.simulate(made, seed=1, report=lambda r, s: loss(s), save=True)
    assert dict(heard) == {t: {} if t < 6 else loss(t - 6) for t in range(24)}
    mixed = {s.step: s.info.after.weights for s in whole.steps[0]}
    changes = [t for t in range(1, 24) if mixed[t] != mixed[t - 1]]
    assert changes
    assert set(changes) <= {s.info.after.mix_step for s in whole.steps[0]}
    assert len(changes) < 8
    for t in changes:
        assert mixed[t][0] == 1.0 + sum(1.0 + s for s in range(t - 6 + 1))


def test_a_plain_function_hears_nothing_and_may_prefetch_as_far_as_it_likes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Any] = []

    def plain(step: int, feedback: Any) -> list[float]:
        heard.append(feedback)
        return [1.0, 1.0]

    with (
        caplog.at_level(logging.WARNING, "overlord"),
        launch(job(plain, feedback_lag=1), prefetch=6) as session,
    ):
        client = session.client(0)
        for step in client:
            client.report(step.step, loss(step.step))
        assert session.metrics()["feedback"] == {
            "received": 24,
            "used": 0,
            "late": 0,
            "pending": 0,
            "invalid": 0,
        }
        assert "reports" not in client.state_dict()
    assert heard == [{}] * 24
    assert [r.message for r in caplog.records] == [
        "reports are not used: the mixture has neither a state nor takes_feedback = True"
    ]


def test_a_plain_function_hears_reports_when_it_says_so() -> None:
    heard: list[Any] = []

    def asks(step: int, feedback: Any) -> list[float]:
        heard.append((step, dict(feedback)))
        return [1.0 + feedback.get("loss/a", 0.0), 1.0]

    asks.takes_feedback = True  # type: ignore[attr-defined]
    made = job(asks, feedback_lag=3)
    whole = ov.simulate(made, seed=4, prefetch=1, report=lambda r, s: loss(s), save=True)
    assert dict(heard) == {t: {} if t < 3 else loss(t - 3) for t in range(24)}
    again = ov.simulate(
        made, seed=5, prefetch=1, report=lambda r, s: loss(s), resume=whole.states[10]
    )
    assert [s.plan_digest for s in again.steps[0]] == [s.plan_digest for s in whole.steps[0]][11:]


def test_which_mixtures_take_feedback() -> None:
    names = {"a": 1.0, "b": 2.0}
    assert learns(ov.schedule.odm(names))
    assert learns(ov.schedule.staged({0: names, 5: ov.schedule.odm(names)}))
    assert learns(Listener([]))
    for other in (
        None,
        names,
        ov.schedule.constant(names),
        ov.schedule.linear(names, {"a": 1.0}, steps=5),
        lambda step, feedback: names,
    ):
        assert not learns(other)


def test_a_lag_too_short_for_the_prefetch_is_refused_where_there_is_feedback() -> None:
    with pytest.raises(JobError, match=r"feedback_lag: expected at least prefetch \+ 2 = 6, got 5"):
        ov.launch(job(Listener([]), feedback_lag=5))
    for mixture in (None, {"a": 1.0}, ov.schedule.linear({"a": 1.0}, {"b": 1.0}, steps=9)):
        launch(job(mixture, feedback_lag=1), prefetch=7).close()


# What is refused


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"loss/a": 1e200}, "loss/a: expected a finite number .at most 1e\\+100"),
        ({"loss/a": 10**400}, "finite"),
        ({"loss/a": "2.3"}, "got '2.3'"),
        ({"loss/a": True}, "got True"),
        ({"loss/a": None}, "got None"),
        ({"loss/a": [1.0]}, "finite number"),
        ({"loss/a": np.ones(2)}, "finite number"),
        ({"loss/a": torch.ones(3)}, "finite number"),
        ({"": 1.0}, "metric name of 1 to 200 characters, got ''"),
        ({3: 1.0}, "metric name of 1 to 200 characters, got 3"),
        ({"x" * 201: 1.0}, "metric name"),
        ({f"m{k}": 1.0 for k in range(5000)}, "at most 4096 metrics, got 5000"),
        ({"tokens/a": -1.0}, "tokens/a: expected a number of tokens"),
        ([("loss/a", 1.0)], "expected a mapping of metric name to number"),
        (2.31, "expected a mapping"),
    ],
)
def test_what_is_no_report_is_told_to_the_caller_and_changes_nothing(
    metrics: Any, problem: str
) -> None:
    with launch(job(Listener([]))) as session:
        client = session.client(0)
        next(client)
        with pytest.raises(JobError, match=problem):
            client.report(0, metrics)
        assert session.metrics()["feedback"] == {
            "received": 0,
            "used": 0,
            "late": 0,
            "pending": 0,
            "invalid": 1,
        }


def test_all_that_is_wrong_with_a_report_is_said_at_once() -> None:
    with launch(job(Listener([]))) as session:
        client = session.client(0)
        next(client)
        with pytest.raises(JobError) as caught:
            client.report(0, {"loss/a": "2", "": 1.0, "loss/b": 2.0, "tokens/b": -3})
        assert len(caught.value.problems) == 3
        assert "rank 0, step 0" in str(caught.value)
        with pytest.raises(JobError) as caught:
            client.report(0, {f"x{k}": None for k in range(100)})  # type: ignore[arg-type]
        assert "and 95 more" in str(caught.value)


def test_a_loss_that_is_no_number_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    with launch(job(Listener(heard), feedback_lag=6)) as session:
        client = session.client(0)
        for step in client:
            client.report(step.step, {"loss/a": math.nan, "loss/b": -math.inf, "loss/c": 2.0})
        assert session.metrics()["feedback"]["invalid"] == len(heard)
    assert heard[6] == (6, {"loss/c": 2.0})
    assert [r.message for r in caplog.records] == [
        "rank 0, step 0: 2 reported values ignored: expected finite numbers"
    ]


def test_numbers_of_other_libraries_are_numbers() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    with launch(job(Listener(heard), feedback_lag=6)) as session:
        client = session.client(0)
        for step in client:
            client.report(
                np.int64(step.step),
                {"loss/a": np.float32(0.5), "loss/b": torch.tensor(2.5), "n": np.int64(3), "m": 4},
            )  # type: ignore[arg-type]
        json.dumps(client.state_dict())
    assert heard[6] == (6, {"loss/a": 0.5, "loss/b": 2.5, "n": 3.0, "m": 4.0})


def test_a_step_that_was_not_delivered_cannot_be_reported() -> None:
    with launch(job(Listener([]))) as session:
        client = session.client(0)
        with pytest.raises(JobError, match="got step 0; no step is taken yet"):
            client.report(0, loss(0))
        next(client)
        with pytest.raises(JobError, match="got step 1; steps up to 0 are taken"):
            client.report(1, loss(1))
        for wrong in (-1, "0", 0.5):
            with pytest.raises(JobError, match="step"):
                client.report(wrong, loss(0))  # type: ignore[arg-type]
        client.close()
        with pytest.raises(OverlordError, match="rank 0 is closed"):
            client.report(0, loss(0))
    with pytest.raises(OverlordError, match="the session is closed"):
        client.report(0, loss(0))


def test_a_schedule_whose_state_is_no_json_ends_the_job_with_a_word_about_it() -> None:
    class Odd(Listener):
        def state_dict(self) -> dict[str, Any]:
            return {"total": np.zeros(2)}

        def __deepcopy__(self, memo: Any) -> Odd:
            return Odd(self.heard)

    with (
        launch(job(Odd([]))) as session,
        pytest.raises(PlanError, match=r"expected plain JSON from state_dict\(\)"),
    ):
        next(session.client(0))


def test_a_schedule_that_cannot_be_copied_is_refused_at_launch() -> None:
    class Locked(Listener):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle '_thread.lock' object")

    with pytest.raises(JobError, match=r"mixture: expected a schedule that copy.deepcopy can copy"):
        ov.launch(job(Locked([])))


# State


def test_a_state_holds_what_was_reported_after_its_step_was_planned_and_what_the_schedule_learned() -> (
    None
):
    with launch(job(Listener([]), feedback_lag=6), prefetch=4) as session:
        client = session.client(0)
        for _ in range(9):
            client.report(next(client).step, {"loss/a": 2.0, "tokens/a": 7.0})
        state = json.loads(json.dumps(client.state_dict()))
    assert state["step"] == 9
    assert state["schedule"] == {"total": 2.0 * 3}  # of steps 0 to 2, which plans 6 to 8 used
    assert {int(s): ranks for s, ranks in state["reports"].items()} == {
        s: {"0": {"loss/a": 2.0, "tokens/a": 7.0}} for s in range(3, 9)
    }


def test_a_state_holds_no_report_of_a_step_behind_it() -> None:
    """The slowest rank's state, when a faster one has reported of steps that are to come again."""
    with launch(job(Listener([]), dp=2, feedback_lag=6)) as session:
        fast, slow = session.client(0), session.client(1)
        for _ in range(3):
            fast.report(next(fast).step, loss(0))
        slow.report(next(slow).step, loss(1))
        assert session.state_dict()["reports"] == {"0": {"0": loss(0), "1": loss(1)}}
        assert list(fast.state_dict()["reports"]) == ["0", "1", "2"]


def test_what_is_said_in_time_is_in_a_state_before_the_planner_has_heard_of_it() -> None:
    with launch(job(Listener([]), feedback_lag=6), prefetch=4) as session:
        client, held, done = session.client(0), threading.Event(), threading.Event()
        bare = [next(client) and client.position for _ in range(3)][-1]
        until(lambda: runtime_of(session).planner.next_step == 7)
        loop_of(session).post(lambda: (held.set(), done.wait(10)))  # type: ignore[arg-type, return-value]
        assert held.wait(10)
        client.report(0, loss(0))  # late for the promise: what becomes of it is the planner's word
        client.report(1, loss(7))
        client.report(1, loss(1))  # the last word counts
        client.report(2, loss(2))
        known = KnownReports().with_pending(running_job(session).unconfirmed_reports())
        state = generation_of(session).events.completed(
            bare,  # type: ignore[arg-type]
            session.job.names,
            reports=known.reports,
        )
        assert [(r.step, r.metrics) for r in state.reports] == [(1, loss(1)), (2, loss(2))]
        done.set()
        assert session.state_dict()["reports"] == {str(s): {"0": loss(s)} for s in (1, 2)}


def test_a_report_on_its_way_counts_in_states_until_the_planner_has_applied_it() -> None:
    first, second = Report(3, 0, loss(1)), Report(3, 0, loss(2))
    late = SentReport(9, Report(2, 0, loss(9)), in_time=False)
    sender = ReportSender(lag=6)
    sender.add(first, in_time=True)
    sender.add(second, in_time=True)
    on_their_way = [*sender.kept(), late]
    assert KnownReports().with_pending(on_their_way).reports == [second]
    heard = KnownReports([first], {0: 1})  # the second counts, though only the first has arrived
    assert heard.with_pending(on_their_way).reports == [first, second]
    assert KnownReports([first], {0: 2}).with_pending(on_their_way).reports == [first]


def test_a_client_keeps_its_last_report_of_a_step_while_plans_or_states_may_need_it() -> None:
    kept, sender = KeptReports(lag=3), ReportSender(lag=3, client=2)
    for step, in_time in ((4, True), (5, True), (4, True), (4, False)):
        kept.add(sender.add(Report(step, 0, loss(step)), in_time))
    assert kept.after() == sender.kept()
    assert [(sent.report.step, sent.in_time) for sent in kept.after()] == [
        (5, True),
        (4, True),
        (4, False),  # it may be too late: then the one before it counts
    ]
    numbers = [sent.number for sent in kept.after()]
    assert min(numbers) > 2**33, "higher than any number of the client before it"
    assert [sent.number for sent in kept.after(numbers[0])] == numbers[1:]
    kept.add(sender.kept()[0])  # sent again
    assert [sent.number for sent in kept.after()] == numbers
    kept.drop_passed(10)
    assert len(kept.after()) == 3
    kept.drop_passed(11)
    assert [sent.report.step for sent in kept.after()] == [5]


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_report_is_promised_exactly_if_its_rank_has_not_asked_for_the_second_next_step(
    prefetch: int,
) -> None:
    lag = prefetch + 2
    assert [
        surely_in_time(Report(7, 0, {}), handed + 1, lag, prefetch) for handed in (7, 8, 9)
    ] == [True, True, False]
    assert surely_in_time(Report(7, 0, {}), 10, lag + 1, prefetch)


def test_a_state_of_a_job_without_feedback_has_nothing_of_it() -> None:
    with launch(job(None)) as session:
        client = session.client(0)
        next(client)
        client.report(0, loss(0))
        assert not {"schedule", "reports", "weights"} & set(client.state_dict())


def test_a_state_that_the_schedule_cannot_load_is_refused_and_the_session_stays_where_it_is() -> (
    None
):
    with launch(job(Listener([]))) as session:
        client = session.client(0)
        next(client)
        state = client.state_dict()
        with pytest.raises(StateMismatch, match="its saved state"):
            client.load_state_dict({**state, "schedule": {"else": 1}})
        assert session.state_dict()["schedule"] == {"total": 0.0}
        with pytest.raises(StateMismatch, match="damaged"):
            client.load_state_dict({**state, "reports": {"0": {"0": {"loss/a": "much"}}}})
        assert next(client).step == 1


def test_another_mixture_may_be_allowed_and_begins_to_learn() -> None:
    with launch(job(Listener([]))) as session:
        client = session.client(0)
        client.report(next(client).step, loss(0))
        state = client.state_dict()
    for mixture in ({"a": 1.0}, ov.schedule.linear({"a": 1.0}, {"b": 1.0}, steps=9)):
        with launch(job(mixture), resume=state, allow=("mixture",)) as session:
            assert next(session.client(0)).step == 1


def test_ranks_that_saved_before_all_had_reported_may_still_load_their_own_states() -> None:
    """The last reports are in some of the states and not in others; together they hold all, whoever
    loads first.
    """
    made = job(Listener([]), dp=3, feedback_lag=4)

    def metrics(rank: int, step: int) -> dict[str, float]:
        return {"loss/a": float(rank + step)}

    with launch(made, prefetch=2) as session:
        clients = [session.client(r) for r in range(3)]
        states = []
        for t in range(9):
            steps = [next(client) for client in clients]
            for client in clients:
                client.report(t, metrics(client.rank, t))
                if t == 8:  # each behind its own report, before those of the ranks after it
                    states.append(json.loads(json.dumps(client.state_dict())))
        assert len({json.dumps(s) for s in states}) == 3
        wanted = []
        for t in range(9, 24):
            steps = [next(client) for client in clients]
            wanted.append(steps[0].plan_digest)
            for client in clients:
                client.report(t, metrics(client.rank, t))
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        with launch(made, prefetch=2) as session:
            clients = [session.client(r) for r in range(3)]
            [next(client) for client in clients]
            for r in order:
                clients[r].load_state_dict(states[r])
            got = []
            for t in range(9, 24):
                steps = [next(client) for client in clients]
                got.append(steps[0].plan_digest)
                for client in clients:
                    client.report(t, metrics(client.rank, t))
            assert got == wanted
            assert session.metrics()["feedback"]["late"] == 0


def test_a_report_of_a_step_that_is_over_after_another_rank_rewound_is_of_no_effect() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    with launch(job(Listener(heard), dp=2, feedback_lag=6)) as session:
        clients = [session.client(0), session.client(1)]
        state = clients[0].state_dict()
        for client in clients:
            next(client)
        clients[0].load_state_dict(state)
        heard.clear()
        clients[1].report(0, loss(99))
        clients[1].load_state_dict(state)
        for _ in range(12):
            for client in clients:
                next(client)
    assert all(not said for _, said in heard)


# Metrics


def test_metrics_tell_what_was_wanted_and_what_was_drawn_step_by_step() -> None:
    with launch(job({"a": 3.0, "b": 1.0}, steps=200), prefetch=2) as session:
        client = session.client(0)
        for _ in range(90):
            next(client)
        until(lambda: session.metrics()["mix"]["step"][-1] >= 91)
        mix = json.loads(json.dumps(session.metrics()["mix"]))
        plans = {step: session.plan(step) for step in mix["step"]}
    assert len(mix["step"]) == 64
    assert mix["step"][-1] == 91
    assert mix["step"] == list(range(28, 92))
    for k, step in enumerate(mix["step"]):
        assert (mix["wanted"]["a"][k], mix["wanted"]["b"][k]) == (0.75, 0.25)
        for i, name in enumerate("ab"):
            mine = plans[step].source == i
            assert mix["samples"][name][k] == pytest.approx(mine.mean())
            assert mix["tokens"][name][k] == pytest.approx(
                plans[step].tokens[mine].sum() / plans[step].tokens.sum()
            )


def test_a_source_that_left_is_no_longer_wanted() -> None:
    made = job(None, until="all")
    short = replace(made.sources[0], epochs=1)
    with launch(replace(made, sources=[short, replace(made.sources[1], epochs=2)])) as session:
        list(session.client(0))
        mix = session.metrics()["mix"]
    assert mix["wanted"]["a"][0] == 0.5
    assert mix["wanted"]["a"][-1] == 0.0
    assert mix["wanted"]["b"][-1] == 1.0
