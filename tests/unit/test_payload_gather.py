"""Payload that comes in: nothing is believed of it before it is known to be what was planned, and
no peer can break who gathers it.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.constructor.assembler import Assembler
from overlord.constructor.images import PixelForm, _fill_all
from overlord.constructor.payload_gather import MAX_EARLY, PayloadGatherer, check_payload
from overlord.constructor.service import ConstructorService
from overlord.content import Scattered
from overlord.errors import ActorLost, OverlordError, PlanError
from overlord.mesh import Batch
from overlord.messages.control import (
    Attach,
    ConstructorPlan,
    EncodedState,
    EncoderPlan,
    EndOfJob,
    PlannedStep,
)
from overlord.messages.data import StepPayload
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.sample import Ragged
from overlord.transforms.image_items import Prefix
from overlord.transport.codec import decode, encode
from tests.internals import early_payload

AFTER = EncodedState(0, np.zeros(1, np.uint8))


def placed(
    step: int, lengths: list[int], origins: tuple[int, ...], doc: list[int] | None = None
) -> ConstructorPlan:
    n = len(lengths)
    zeros = np.zeros(n, np.int32)
    main = Assignment(
        axis="DP",
        n_buckets=1,
        n_microbatches=1,
        sample=np.arange(n),
        bucket=zeros,
        microbatch=zeros,
        slot=np.arange(n, dtype=np.int32),
        size=np.array(lengths),
        cost=np.ones(n),
    )
    plan = LoadingPlan(
        step=step,
        names=("web",),
        source=zeros,
        epoch=zeros,
        file=zeros,
        row=np.arange(n),
        part=zeros,
        tokens=np.array(lengths),
        modules={"backbone": main},
    )
    return ConstructorPlan(
        PlannedStep(
            plan, np.zeros(0, np.int64), np.arange(n) if doc is None else np.array(doc), "", AFTER
        ),
        origins,
    )


def documents(*lengths: int, first: int = 0) -> Ragged:
    return Ragged.from_rows(
        [np.full(n, first + i, np.int32) for i, n in enumerate(lengths)], np.int32
    )


class Box:
    """A client's box that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}

    def put(self, told: Any, bucket: Any) -> None:
        self.steps[told.step] = bucket.microbatches[0]["tokens"].tolist()

    def end(self, error: Exception | None, *, drop: bool = False) -> None:
        pass


class Here:
    """A constructor whose work is done at once."""

    def __init__(self, images: PixelForm | None = None) -> None:
        self.finished: list[EndOfJob] = []
        self.box, self._queue = Box(), deque[Any]()
        self.building = ConstructorService(
            [Assembler(0, [0])],
            batch=Batch(samples=4, context=32),
            multiple=1,
            executor=self,
            run=self.run,
            cannot=self.finished.append,
            images=images,
        )
        self.gathering = PayloadGatherer(self.building)
        self.run(self.building.attach({0: self.box}))

    def submit(self, name: str, work: Any, done: Any, **_: Any) -> None:
        try:
            outcome = work()
        except Exception as error:
            done(None, error)
        else:
            done(outcome, None)

    def run(self, commands: Any) -> None:
        self._queue.extend(commands)
        while self._queue:
            self.building.execute(self._queue.popleft(), self._queue)


def test_payload_of_several_workers_is_joined_in_the_order_of_the_plan_whenever_it_comes() -> None:
    here = Here()
    here.run(here.gathering.payload(StepPayload(0, 7, documents(3, first=20))))
    assert here.gathering.waiting() == ""
    here.run(here.gathering.plan(placed(0, [2, 3], (3, 7))))
    assert here.gathering.waiting() == "step 0: payload of loader-worker/3"
    here.run(here.gathering.payload(StepPayload(0, 7, documents(3, first=30))))  # the first counts
    here.run(here.gathering.payload(StepPayload(0, 3, documents(2, first=10))))
    assert here.box.steps == {0: [10, 10, 20, 20, 20]}


def test_a_bucket_that_has_no_document_in_a_step_needs_no_payload() -> None:
    here = Here()
    here.run(here.gathering.plan(placed(0, [], ())))
    assert here.box.steps == {0: [0]}


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([2], "expected 2 documents of loader-worker/3, loader-worker/7, got 3"),
        ([5], "expected 2 tokens of web/e0/f0/r0 from loader-worker/3, got 5"),
    ],
    ids=["too many", "of another length"],
)
def test_payload_that_is_not_what_was_planned_is_delivered_to_nobody(
    lengths: list[int], words: str
) -> None:
    here = Here()
    here.run(here.gathering.plan(placed(4, [2, 3], (3, 7))))
    here.run(here.gathering.plan(placed(5, [2], (3,))))
    here.run(here.gathering.payload(StepPayload(4, 3, documents(*lengths))))
    here.run(
        here.gathering.payload(
            StepPayload(4, 7, documents(3) if lengths == [5] else documents(3, 1))
        )
    )
    [finish] = here.finished
    assert finish.step == 4
    assert isinstance(finish.error, PlanError)
    assert words in str(finish.error)
    here.run(here.gathering.payload(StepPayload(5, 3, documents(2))))
    assert here.box.steps == {}, "the job ends before step 4"


def test_a_plan_for_hooks_is_whole_and_its_payload_is_not() -> None:
    here = Here()
    here.run(here.gathering.plan(placed(0, [9, 2], (3,), doc=[-1, 0])))
    assert here.gathering.payload(StepPayload(0, 3, documents(2)))
    assert here.finished == []


def test_a_worker_that_sends_no_more_ends_the_job_before_the_first_step_that_misses_it() -> None:
    here = Here()
    for step in (1, 2, 3):
        here.run(here.gathering.plan(placed(step, [2, 3], (3, 7))))
        here.run(here.gathering.payload(StepPayload(step, 3, documents(2))))
    here.run(here.gathering.payload(StepPayload(1, 7, documents(3))))
    here.run(here.gathering.lost(7, "killed"))
    assert list(here.box.steps) == [1]
    assert [(f.step, str(f.error)) for f in here.finished] == [
        (2, "loader-worker/7 is lost: killed")
    ]
    assert isinstance(here.finished[0].error, ActorLost)
    assert here.gathering.complete_until == 2


def test_what_nobody_wants_is_not_kept() -> None:
    here = Here()
    here.run(here.gathering.plan(placed(5, [2], (3,))))
    for step in (0, 4):
        assert here.gathering.payload(StepPayload(step, 3, documents(2))) == []
    for step in range(10, 10 + 2 * MAX_EARLY):
        here.gathering.payload(StepPayload(step, 3, documents(2)))
    assert len(early_payload(here.gathering)[3]) == MAX_EARLY
    here.run(here.gathering.payload(StepPayload(5, 3, documents(2, first=1))))
    here.run(here.gathering.payload(StepPayload(5, 3, documents(2, first=9))))
    assert here.box.steps == {5: [1, 1]}, "the first counts, and there is no second"
    here.run(here.gathering.finish(EndOfJob(6)))
    assert early_payload(here.gathering) == {}


THINGS = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3), st.just([3])
)
ARRAYS = st.sampled_from(
    [
        np.zeros(4, np.int32),
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.int64),
        np.zeros(0, np.int64),
        np.zeros(3, bool),
        np.array([0, 2, 4]),
        np.array([0, 4, 2]),
        np.array([-1, 2]),
        np.array([0, 2, 5]),
        np.array([0, 2**62]),
        np.array([2**62, -(2**62)]),
        np.array([0, 2], np.uint64),
        np.array([0, 2], np.int32),
    ]
)


@given(THINGS, THINGS, ARRAYS, ARRAYS, st.booleans())
def test_whatever_a_peer_sends_is_taken_as_documents_or_refused(
    step: Any, origin: Any, values: Any, offsets: Any, whole: bool
) -> None:
    payload = StepPayload(5 if whole else step, 3 if whole else origin, Ragged(values, offsets))
    try:
        payload = decode(*encode(payload))
        check_payload(payload, 3)
    except OverlordError:
        return
    assert (payload.origin, type(payload.step)) == (3, int)
    joined = Ragged.concat([documents(2), payload.tokens, payload.tokens])
    assert len(joined) == 2 * len(payload.tokens) + 1
    assert int(joined.offsets[-1]) == len(joined.values) == 2 + 2 * payload.tokens.lengths.sum()


def test_what_is_no_column_of_documents_is_refused() -> None:
    for tokens in (None, 3, "x", [1], np.zeros(3), Attach(1)):
        with pytest.raises(OverlordError, match="expected documents of whole numbers, got"):
            check_payload(StepPayload(0, 3, tokens), 3)  # type: ignore[arg-type]


# images


def image(patch: int = 1, value: int = 5, magic: bytes = b"") -> np.ndarray:
    prefix = Prefix(
        form=1, patch=patch, merge=1, dtype="uint8", grid=(1, 1, 1), box=(0, 0, 1, 1), size=(1, 1)
    ).pack()
    return np.frombuffer(
        magic + prefix[len(magic) :] + bytes([value] * 3 * patch * patch), np.uint8
    )


def with_images(placed: ConstructorPlan, n: int) -> ConstructorPlan:
    """One rank encodes n images of the first document, in the order in which they come."""
    one, none = np.array([0, n]), np.zeros(n, np.int64)
    encoding = EncoderPlan(
        ranks=np.array([0]),
        n_slots=1,
        per="microbatch",
        item=np.arange(n),
        at=np.arange(n),
        ids=np.zeros((n, 5), np.int64),
        number=none,
        home=np.zeros((n, 3), np.int64),
        send_lens=none.astype(np.int32),
        bounds=one,
        sent=np.stack((np.arange(n), none, none), axis=1),
        sent_bounds=one,
        send_splits=np.zeros((1, 1), np.int32),
        recv_splits=np.zeros((1, 1), np.int32),
        recv_perm=np.arange(n),
        out_lens=none.astype(np.int32),
        microbatch=none.astype(np.int32),
        position=none,
        recv_bounds=one,
        placeholders=np.zeros((0, 5), np.int64),
    )
    return replace(placed, stage=replace(placed.stage, encoding=encoding))


def gathered(*images: np.ndarray | None, wanted: int = 2) -> Here:
    """A step with two images, one from each of two workers; None: the worker sends none."""
    here = Here(PixelForm(3, "uint8"))
    here.run(here.gathering.plan(with_images(placed(0, [2, 3], (3, 7)), wanted)))
    for host, tokens, found in zip((3, 7), (documents(2), documents(3)), images, strict=True):
        payload = StepPayload(
            0, host, tokens, items=None if found is None else Ragged.from_rows([found], np.uint8)
        )
        check_payload(payload, host)
        here.run(here.gathering.payload(payload))
    return here


def test_images_of_several_workers_are_one_column() -> None:
    here = gathered(image(value=4), image(value=9))
    assert not here.finished
    assert here.box.steps == {0: [0, 0, 0, 0, 0]}


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ((image(), None), "expected 2 images of loader-worker/3, loader-worker/7, got 1"),
        ((None, None), "got 0"),
        ((image(), image(magic=b"JUNK")), "expected a valid image item"),
        ((image(), np.zeros(7, np.uint8)), "expected an image item of at least 96 bytes"),
        ((image(), image(patch=2)), "expected images of 3 uint8 per patch, got 12 uint8"),
    ],
)
def test_images_that_were_not_planned_end_the_job_in_words(images: Any, words: str) -> None:
    here = gathered(*images)
    assert here.box.steps == {}
    assert [type(f.error) for f in here.finished] == [PlanError]
    assert words in str(here.finished[0].error)


def test_a_step_that_is_left_off_at_the_end_is_logged_as_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = Here(PixelForm(3, "uint8"))
    here.building.stopped = True
    here.run(here.gathering.plan(with_images(placed(0, [2], (3,)), 1)))
    here.run(
        here.gathering.payload(
            StepPayload(0, 3, documents(2), items=Ragged.from_rows([image()], np.uint8))
        )
    )
    assert "stopped while its images were being decoded" in str(here.finished[0].error)
    assert not caplog.records


def test_images_wait_for_no_helper_that_is_busy_with_another_step() -> None:
    held, begun, outs = threading.Event(), threading.Event(), list(np.zeros((8, 1, 3), np.uint8))

    def other_step() -> None:
        begun.set()
        held.wait(60)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(other_step)
        assert begun.wait(30)
        try:
            assert _fill_all([image(value=i) for i in range(8)], outs, pool, lambda: False, 0) == []
            assert not held.is_set()
        finally:
            held.set()
    assert [out.tolist() for out in outs] == [[[i, i, i]] for i in range(8)]


@given(ARRAYS, ARRAYS, st.sampled_from([np.uint8, None]))
def test_whatever_a_peer_sends_is_taken_as_images_or_refused(
    values: Any, offsets: Any, dtype: Any
) -> None:
    payload = StepPayload(
        5,
        3,
        documents(2),
        items=Ragged(values if dtype is None else np.abs(values).astype(dtype), offsets),
    )
    try:
        payload = decode(*encode(payload))
        check_payload(payload, 3)
    except OverlordError:
        return
    assert payload.items is not None
    joined = Scattered([payload.items, payload.items], np.zeros(0, np.int64))
    assert [joined[i].dtype for i in range(len(joined))] == [np.uint8] * (2 * len(payload.items))
    assert (
        sum(len(joined[i]) for i in range(len(joined)))
        == joined.nbytes
        == 2 * payload.items.lengths.sum()
    )


def test_what_is_no_column_of_images_is_refused() -> None:
    for items in (3, "x", [1], np.zeros(3, np.uint8), Attach(1), documents(3)):
        with pytest.raises(OverlordError, match="expected images as bytes, got"):
            check_payload(StepPayload(0, 3, documents(1), items=items), 3)  # type: ignore[arg-type]
