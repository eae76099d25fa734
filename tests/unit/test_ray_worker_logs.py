"""The last output of an actor on Ray is read from files of its node, without output of others, and
bounded.
"""

from __future__ import annotations

from pathlib import Path

from overlord.cluster.supervisor import restart_limit_error
from overlord.errors import ActorLost
from overlord.ray.worker_logs import BYTES, LINES, WorkerOutput


def test_the_last_lines_are_those_of_this_actor_without_what_ray_writes_for_itself(
    tmp_path: Path,
) -> None:
    err, out = tmp_path / "worker.err", tmp_path / "worker.out"
    err.write_text("of an actor before\n")
    out.touch()
    words = WorkerOutput.from_hello(WorkerOutput.to_hello("10.0.0.7", [str(err), str(out), ""]))
    assert words.last_lines() == [], "it has said nothing yet"
    err.write_text("of an actor before\n:actor_name:Hosted\nTraceback\n\nsegmentation fault")
    out.write_text("and this\n")
    assert words.last_lines() == ["Traceback", "segmentation fault", "and this"]
    assert words.where == f"its last output is in {err} and {out} on node 10.0.0.7"


def test_they_are_few_however_much_was_said_and_none_where_the_file_is_gone(tmp_path: Path) -> None:
    err = tmp_path / "worker.err"
    err.touch()
    words = WorkerOutput.from_hello(WorkerOutput.to_hello("n", [str(err)]))
    err.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert words.last_lines() == [f"line {i}" for i in range(100_000 - LINES, 100_000)]
    err.write_bytes(b"\xff" * 10 * BYTES)
    assert sum(map(len, words.last_lines())) <= BYTES
    err.unlink()
    assert words.last_lines() == []


def test_of_one_who_does_not_say_where_its_output_is_nothing_is_known() -> None:
    for said in (None, {}, {"node": "n", "files": ["x"]}, {"node": 3, "files": {}}):
        assert (
            WorkerOutput.from_hello(said).last_lines(),
            WorkerOutput.from_hello(said).where,
        ) == ([], "")


def test_a_worker_that_is_given_up_names_one_place_for_what_it_said() -> None:
    here = str(restart_limit_error(ActorLost("loader-worker/0", "exit code 9"), 3))
    assert "; its last output is in the output of the job: fix the cause" in here
    there = str(
        restart_limit_error(
            ActorLost(
                "loader-worker/0", f"it died; {WorkerOutput('n', {'/logs/worker.err': 0}).where}"
            ),
            3,
        )
    )
    assert there.count("its last output is in") == 1
    assert "its last output is in /logs/worker.err on node n; it was started again 3 times" in there
    assert there.endswith("; fix the cause; or raise max_restarts, if the cause is temporary")
