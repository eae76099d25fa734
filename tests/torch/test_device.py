"""The prefetcher hands out the client's steps as tensors, ahead of need; its state is that of the
step the trainer has.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
import overlord.torch as ot
from tests.internals import connection_of, pretend_fork
from tests.processes import plain
from tests.processes import written as written_whole
from tests.torch.jobs import text_job

torch = pytest.importorskip("torch")

WAIT_S = 30.0


def until(what: Callable[[], bool]) -> None:
    """A deadline for what must come."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def written(step: ov.Step) -> tuple[Any, ...]:
    """Without what is sent to encoders: these jobs have none."""
    return written_whole(step)[:5]


def seen(step: Any) -> tuple[Any, ...]:
    """All that a trainer can see of a step of tensors, as ``written`` says it of a step."""
    arrays = [
        [
            (key, str(mb[key].numpy().dtype), tuple(mb[key].shape), mb[key].numpy().tobytes())
            for key in sorted(mb)
        ]
        for mb in step
    ]
    return (
        step.step,
        step.plan_digest,
        step.global_valid_tokens,
        arrays,
        [[(*p, k) for p, k in zip(mb.samples, mb.begins.tolist(), strict=True)] for mb in step],
    )


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("overlord-prefetch")]


@pytest.mark.parametrize("runtime", ["local", "process"])
@pytest.mark.parametrize("depth", [1, 3])
def test_steps_are_those_of_the_client(tmp_path: Path, runtime: str, depth: int):
    job = text_job(tmp_path)
    with ov.launch(job) as session:
        wanted = [written(step) for step in session.client(0)]
    with (
        ov.launch(job, runtime=runtime) as session,
        ot.DevicePrefetcher(session.client(0), "cpu", depth=depth) as steps,
    ):
        assert [seen(step) for step in steps] == wanted
        assert steps.steps == len(wanted)
        with pytest.raises(StopIteration):
            next(steps)
    assert threads() == []


def test_microbatches_come_in_a_row(tmp_path: Path):
    job = text_job(tmp_path)
    with ov.launch(job) as session:
        wanted = [mb["tokens"].tolist() for mb in session.client(0).microbatches()]
    with ov.launch(job) as session, ot.DevicePrefetcher(session.client(0), "cpu") as steps:
        assert [mb["tokens"].tolist() for mb in steps.microbatches()] == wanted


def test_no_more_than_depth_steps_are_taken_ahead(tmp_path: Path):
    with ov.launch(text_job(tmp_path, until=20)) as session:
        client = session.client(0)
        with ot.DevicePrefetcher(client, "cpu", depth=3) as steps:
            assert steps.ready == client.steps == 0  # nothing before the first is asked for
            next(steps)
            until(lambda: steps.ready == 3)
            assert client.steps == 4


@pytest.mark.parametrize("runtime", ["local", "process"])
def test_the_state_is_that_of_the_step_the_trainer_has_not_of_those_taken_ahead(
    tmp_path: Path, runtime: str
):
    job = text_job(tmp_path)
    with ov.launch(job) as session:
        client = session.client(0)
        states = [plain(client.state_dict()), *(plain(client.state_dict()) for _ in client)]
        wanted = states[:]
    with ov.launch(job, runtime=runtime) as session:
        steps = ot.DevicePrefetcher(session.client(0), "cpu", depth=3)
        assert plain(steps.state_dict()) == wanted[0]
        for n in (1, 2):
            next(steps)
            until(lambda: steps.ready == 3)
            assert plain(steps.state_dict()) == wanted[n]
        mark = steps.mark()
        next(steps)
        assert plain(steps.state_dict(mark)) == wanted[2]
        saved = steps.state_dict()
        steps.close()
    with ov.launch(job, resume=saved) as session:
        assert next(session.client(0)).step == 3


def test_a_state_is_loaded_before_the_first_step_and_in_the_middle_of_a_run(tmp_path: Path):
    job = text_job(tmp_path)
    with ov.launch(job) as session:
        client = session.client(0)
        wanted = [written(next(client)) for _ in range(2)]
        saved = client.state_dict()
        wanted += [written(step) for step in client]
    with ov.launch(job) as session, ot.DevicePrefetcher(session.client(0), "cpu", depth=3) as steps:
        steps.load_state_dict(saved)
        assert seen(next(steps)) == wanted[2]
        assert seen(next(steps)) == wanted[3]
        until(lambda: steps.ready == 3)
        steps.load_state_dict(saved)
        assert plain(steps.state_dict()) == plain(saved)
        assert [seen(step) for step in steps] == wanted[2:]
        steps.load_state_dict(saved)  # also behind the end
        assert [seen(step) for step in steps] == wanted[2:]


class Gated:
    """A client whose steps come when they are let through."""

    def __init__(self, client: ov.Client):
        self.client, self.rank = client, client.rank
        self.asked, self.open = threading.Event(), threading.Event()

    def __next__(self) -> ov.Step:
        self.asked.set()
        assert self.open.wait(WAIT_S)
        return next(self.client)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


def test_a_state_that_is_refused_costs_no_step(tmp_path: Path):
    """Not those that were taken ahead, and not the one that the thread waits for."""
    with ov.launch(text_job(tmp_path)) as session:
        client = Gated(session.client(0))
        client.open.set()
        with ot.DevicePrefetcher(client, "cpu", depth=2) as steps:
            assert next(steps).step == 0
            until(lambda: steps.ready == 2)
            client.open.clear()
            client.asked.clear()
            assert next(steps).step == 1
            assert client.asked.wait(WAIT_S)
            later = threading.Timer(0.05, client.open.set)
            later.start()
            with pytest.raises(ov.StateMismatch):
                steps.load_state_dict({"version": 99})
            later.join()
            assert steps.state_dict()["step"] == 2, "the trainer is where it was"
            assert [step.step for step in steps] == [2, 3, 4, 5, 6, 7]


class Fails:
    """A source that ends with an error at a row of its stream."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"tokens": [1 + i] * 5}


def strategy_that_fails(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
    if buffer.step == 3:
        raise ValueError("no plan for the third")
    return ov.DGraph.from_buffer(buffer, place).mix().distribute("DP").balance("none").plan()


def test_an_error_of_the_stream_comes_to_the_trainer_behind_the_steps_before_it(tmp_path: Path):
    source = ov.Source("all", Fails(), transforms=[ov.Tokens()])
    job = ov.Job(
        name="fails",
        sources=[source],
        batch=ov.Batch(samples=4, context=64),
        strategy=strategy_that_fails,
        until=6,
        place=ov.ClientPlaceTree(dp=1),
    )
    with ov.launch(job) as session, ot.DevicePrefetcher(session.client(0), "cpu", depth=4) as steps:
        assert [next(steps).step for _ in range(3)] == [0, 1, 2]
        for _ in range(2):  # and again, when it is asked again
            with pytest.raises(ValueError, match="no plan for the third"):
                next(steps)
    assert threads() == []


def test_a_host_that_dies_ends_the_iteration_with_its_name(tmp_path: Path):
    with ov.launch(text_job(tmp_path, until=10_000), runtime="process", failover=False) as session:
        steps = ot.DevicePrefetcher(session.client(0), "cpu")
        next(steps)
        session.kill("constructor-worker/0")
        with pytest.raises(ov.ActorLost, match="constructor-worker/0"):
            for _ in steps:
                pass
        steps.close()
    assert threads() == []


def test_closing_wakes_a_thread_that_waits_for_a_step_and_one_that_waits_for_room(tmp_path: Path):
    with ov.launch(text_job(tmp_path, dp=2, until=20), prefetch=3) as session:
        client, idle = session.client(0), session.client(1)
        steps = ot.DevicePrefetcher(client, "cpu", depth=20)
        assert next(steps).step == 0
        until(lambda: client.steps == 3)  # as far as rank 1 lets it go, which takes none
        steps.close()
        assert threads() == []
        assert idle.steps == 0
        with pytest.raises(ov.OverlordError, match="closed"):
            next(steps)
        steps.close()
    with ov.launch(text_job(tmp_path, until=20)) as session:
        steps = ot.DevicePrefetcher(session.client(0), "cpu", depth=2)
        next(steps)
        until(lambda: steps.ready == 2)
        steps.close()
    assert threads() == []


def test_the_time_the_trainer_waited_is_reported(tmp_path: Path):
    with (
        ov.launch(text_job(tmp_path)) as session,
        ot.DevicePrefetcher(session.client(0), "cpu") as steps,
    ):
        next(steps)
        assert steps.waited_s > 0
        until(lambda: steps.ready == 2)
        before = steps.waited_s
        next(steps)
        assert (
            steps.waited_s - before < WAIT_S
        )  # it was there; the bound is for a machine that sleeps, not for the code


def test_reports_go_to_the_client(tmp_path: Path):
    with (
        ov.launch(text_job(tmp_path)) as session,
        ot.DevicePrefetcher(session.client(0), "cpu") as steps,
    ):
        step = next(steps)
        steps.report(step.step, {"loss/web": 2.0})
        with pytest.raises(ov.OverlordError, match="step 99"):
            steps.report(99, {"loss/web": 2.0})


def test_a_fork_is_told_to_make_its_own(tmp_path: Path):
    with (
        ov.launch(text_job(tmp_path)) as session,
        ot.DevicePrefetcher(session.client(0), "cpu") as steps,
    ):
        next(steps)
        pretend_fork(steps, +1)  # as in a copy of this process
        with pytest.raises(
            ov.OverlordError, match=f"got process {os.getpid()}; a fork does not copy its thread"
        ):
            next(steps)
        pretend_fork(steps, -1)


def test_a_depth_of_nothing_is_refused(tmp_path: Path):
    with (
        ov.launch(text_job(tmp_path)) as session,
        pytest.raises(ov.JobError, match="depth: expected a whole number of at least 1"),
    ):
        ot.DevicePrefetcher(session.client(0), "cpu", depth=0)


def test_a_job_in_place_of_a_client_is_refused_at_once(tmp_path: Path):
    with pytest.raises(
        ov.JobError, match=r"expected a client, got Job; open one: overlord\.torch\.join"
    ):
        ot.DevicePrefetcher(text_job(tmp_path), "cpu")


def test_a_client_without_marks_is_asked_for_its_state_at_every_step(tmp_path: Path):
    class Old:
        """As somebody's own wrapper of a client might be."""

        def __init__(self, client: ov.Client):
            self.client, self.rank = client, client.rank

        def __next__(self) -> ov.Step:
            return next(self.client)

        def state_dict(self) -> dict[str, Any]:
            return self.client.state_dict()

        def close(self) -> None:
            self.client.close()

    with (
        ov.launch(text_job(tmp_path)) as session,
        ot.DevicePrefetcher(Old(session.client(0)), "cpu", depth=3) as steps,
    ):
        next(steps)
        until(lambda: steps.ready == 3)
        assert steps.state_dict()["step"] == 1


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cuda
@pytest.mark.parametrize("pin", [True, False])
def test_steps_on_a_cuda_device_are_those_of_the_client(tmp_path: Path, pin: bool):
    job = text_job(tmp_path, until=40)
    with ov.launch(job) as session:
        wanted = [written(step) for step in session.client(0)]
    with (
        ov.launch(job, runtime="process") as session,
        ot.DevicePrefetcher(session.client(0), "cuda", depth=3, pin=pin) as steps,
    ):
        kept = list(steps)
        assert {mb["tokens"].device.type for step in kept for mb in step} == {"cuda"}
        assert {mb["max_seqlen"].device.type for step in kept for mb in step} == {"cpu"}
        assert [seen(step.to("cpu")) for step in kept] == wanted


@cuda
def test_memory_on_the_device_is_not_used_again_before_the_trainer_is_through_with_it(
    tmp_path: Path,
):
    """The trainer's stream is busy for long while its tensors are dropped, and further steps are
    copied.
    """
    job = text_job(tmp_path, until=60)
    with ov.launch(job) as session:
        wanted = [int(sum(mb["tokens"].sum() for mb in step)) for step in session.client(0)]
    with (
        ov.launch(job) as session,
        ot.DevicePrefetcher(session.client(0), "cuda", depth=4) as steps,
    ):
        sums = []
        for step in steps:
            torch.cuda._sleep(20_000_000)  # some ten milliseconds
            sums.append(torch.stack([mb["tokens"].sum() for mb in step]).sum())
            del step
        assert [int(s) for s in sums] == wanted


@cuda
def test_segments_of_the_channel_are_free_once_a_step_is_on_the_device(tmp_path: Path):
    with ov.launch(text_job(tmp_path, until=3), runtime="process") as session:
        client = session.client(0)
        steps = ot.DevicePrefetcher(client, "cuda", depth=3)
        kept = [next(steps)]
        link = connection_of(client.queue)
        kept += list(steps)
        client.move_to(client.queue, client.mark()[1])
        gc.collect()
        assert link.remote_held == 0
        assert [len(mb.samples) > 0 for step in kept for mb in step] == [True] * sum(
            len(step) for step in kept
        )
        assert all(
            np.array_equal(mb["tokens"].shape, mb["labels"].shape) for step in kept for mb in step
        )
        steps.close()
