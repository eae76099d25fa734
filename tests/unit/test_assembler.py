"""Stories of the constructor core."""

from __future__ import annotations

from types import SimpleNamespace

from overlord.constructor.assembler import Assembler
from overlord.errors import SourceError
from overlord.messages.control import Attach, Consumed, Detach, EndOfJob, PlannedStep
from overlord.messages.data import Build, Built, Deliver, EndRank, PayloadReady, Release


def stage(step: int, skipped: bool = False) -> PlannedStep:
    return PlannedStep(
        plan=SimpleNamespace(step=step), pops=None, doc=None, digest="", after=None, skipped=skipped
    )  # type: ignore[arg-type]


def planned(assembler: Assembler, *steps: int) -> None:
    for step in steps:
        assembler.handle(stage(step))
        assert assembler.handle(PayloadReady(step)) == [Build(step, assembler.bucket)]


def test_a_step_is_built_once_and_sent_to_every_rank_of_the_bucket() -> None:
    assembler = Assembler(3, [6, 7])
    assembler.handle(Attach(6))
    assembler.handle(Attach(7))
    planned(assembler, 0)
    assert assembler.handle(Built(0)) == [Deliver(0, 6), Deliver(0, 7)]
    assert assembler.handle(Consumed(6, 0)) == []
    assert assembler.handle(Consumed(7, 0)) == [Release(0, 3)]


def test_steps_arrive_in_order_though_they_are_built_out_of_order() -> None:
    assembler = Assembler(0, [0])
    assembler.handle(Attach(0))
    planned(assembler, 0, 1)
    assert assembler.handle(Built(1)) == []
    assert assembler.handle(Built(0)) == [Deliver(0, 0), Deliver(1, 0)]


def test_so_many_steps_are_built_ahead_of_the_fastest_rank_and_no_more() -> None:
    assembler = Assembler(0, [0, 1], build_ahead=2)
    for rank in (0, 1):
        assembler.handle(Attach(rank))
    planned(assembler, 0, 1)
    for step in (2, 3):
        assembler.handle(stage(step))
        assert assembler.handle(PayloadReady(step)) == []
    assert assembler.waiting() == "step 0: its microbatches to be built"
    assert assembler.handle(Built(0)) == [Deliver(0, 0), Deliver(0, 1)]
    assert assembler.handle(Built(1)) == [Deliver(1, 0), Deliver(1, 1)]
    assert assembler.waiting() == "step 2: an earlier one to be acknowledged"
    assert assembler.handle(Consumed(0, 0)) == [
        Build(2, 0)
    ]  # though the other rank has not taken it
    assert assembler.handle(Consumed(1, 0)) == [Release(0, 0)]
    assert assembler.handle(Consumed(0, 1)) == [Build(3, 0)]
    assert assembler.handle(Built(2)) == [Deliver(2, 0), Deliver(2, 1)]
    assert assembler.handle(Detach(0)) == []
    assert assembler.handle(Detach(1)) == [Release(1, 0), Release(2, 0)]
    assert assembler.handle(Built(3)) == [Release(3, 0)]


def test_payload_that_comes_out_of_order_does_not_keep_the_next_step_from_being_built() -> None:
    assembler = Assembler(0, [0], build_ahead=2)
    assembler.handle(Attach(0))
    for step in range(4):
        assembler.handle(stage(step))
    assert assembler.handle(PayloadReady(2)) == []
    assert assembler.handle(PayloadReady(1)) == [Build(1, 0)]
    assert assembler.handle(PayloadReady(3)) == []
    assert assembler.handle(PayloadReady(0)) == [Build(0, 0)]
    assembler.handle(Built(1))
    assert assembler.handle(Built(0)) == [Deliver(0, 0), Deliver(1, 0)]
    assert assembler.handle(Consumed(0, 1)) == [
        Release(0, 0),
        Release(1, 0),
        Build(2, 0),
        Build(3, 0),
    ]


def test_payload_of_steps_that_are_not_built_goes_with_the_last_rank_and_with_the_end() -> None:
    for event in (Detach(0), EndOfJob(1)):
        assembler = Assembler(0, [0], build_ahead=1)
        assembler.handle(Attach(0))
        planned(assembler, 0)
        assembler.handle(stage(1))
        assert assembler.handle(PayloadReady(1)) == []
        assert assembler.handle(event) == [Release(1, 0)]


def test_nothing_is_built_for_a_bucket_without_clients() -> None:
    assembler = Assembler(0, [0])
    assembler.handle(stage(0))
    assert assembler.handle(PayloadReady(0)) == [Release(0, 0)]


def test_a_skipped_step_is_not_delivered_and_holds_nothing_back() -> None:
    assembler = Assembler(0, [0])
    assembler.handle(Attach(0))
    assembler.handle(stage(0, skipped=True))
    planned(assembler, 1)
    assert assembler.handle(Built(1)) == [Deliver(1, 0)]


def test_the_end_comes_after_the_last_step() -> None:
    assembler, error = Assembler(0, [0]), SourceError("web", "gone")
    assembler.handle(Attach(0))
    planned(assembler, 0)
    assert assembler.handle(EndOfJob(1, error)) == []
    assert assembler.handle(Built(0)) == [Deliver(0, 0), EndRank(0, error)]


def test_a_rank_that_leaves_holds_nothing_back() -> None:
    assembler = Assembler(0, [0, 1])
    assembler.handle(Attach(0))
    assembler.handle(Attach(1))
    planned(assembler, 0)
    assembler.handle(Built(0))
    assembler.handle(Consumed(0, 0))
    assert assembler.handle(Detach(1)) == [Release(0, 0)]


def test_another_buckets_ranks_are_none_of_its_business() -> None:
    assembler = Assembler(0, [0])
    assert assembler.handle(Attach(5)) == []
    assert assembler.handle(Consumed(5, 0)) == []


def test_a_step_joins_a_build_once_and_only_with_its_payload_and_an_attached_rank() -> None:
    assembler = Assembler(0, [0], build_ahead=1)
    assert not assembler.join_build(0)  # nobody is attached
    assembler.handle(Attach(0))
    planned(assembler, 0)
    assembler.handle(stage(1))
    assert not assembler.join_build(1)  # its payload is on its way
    assert assembler.handle(PayloadReady(1)) == []
    assert assembler.join_build(1)
    assert not assembler.join_build(1)
    assert assembler.handle(Built(1)) == []
    assert assembler.handle(Built(0)) == [Deliver(0, 0), Deliver(1, 0)]
