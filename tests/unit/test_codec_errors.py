"""Exceptions in frames: those of Overlord and Python keep type, fields and notes; others become
text; none is invented.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from overlord.errors import (
    DataStall,
    FrameError,
    JobError,
    OverlordError,
    SourceError,
    StateMismatch,
)
from overlord.messages.data import Announce
from overlord.transport.codec import decode, encode
from tests.frames import sent, tree


@pytest.mark.parametrize(
    "error",
    [
        JobError(["a", "b"], "job.yaml"),
        SourceError("web", "gone", "s3://x", "mend it"),
        DataStall("step 3", 2.5, 3, 1),
        StateMismatch({"seed": ("1", "2")}, "take the old one"),
        FrameError("a", "b", "c"),
        OverlordError("plain"),
        ValueError("x", 3),
        KeyError("k"),
        ZeroDivisionError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        FileNotFoundError(2, "no such file", "a.parquet"),
        OSError(5, "I/O error", "a", None, "b"),
        TimeoutError("late"),
        StopIteration(4),
        ExceptionGroup("both", [ValueError(1), JobError(["x"])]),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_error_keeps_its_type_its_fields_and_its_notes(error: Exception):
    error.add_note("at step 3")
    found = sent(Announce(0, 0, 0, 0, None, error=error)).error
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert repr(found.args) == repr(error.args)
    assert found.__notes__ == ["at step 3"]
    assert {k: v for k, v in vars(found).items() if k != "__notes__"} == {
        k: v for k, v in vars(error).items() if k != "__notes__"
    }
    assert (getattr(found, "filename", None), getattr(found, "filename2", None)) == (
        getattr(error, "filename", None),
        getattr(error, "filename2", None),
    )


class OfTheUser(ValueError):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OfTheUser("bad row"), "OfTheUser: bad row"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (ValueError(object), "ValueError: <class 'object'>"),
        (SystemExit(3), "SystemExit: 3"),
        (Mute(), "Mute: an exception whose text raises RuntimeError"),
        (type("JobError", (Exception,), {})("not ours"), "JobError: not ours"),
        (pickle.PicklingError("x"), "PicklingError: x"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_another_error_becomes_ours_with_its_name_in_the_text(error: BaseException, text: str):
    error.add_note("a note")
    found = sent(error)
    assert type(found) is OverlordError
    assert str(found) == text
    assert found.__notes__ == ["a note"]


def test_an_error_about_a_file_with_an_odd_name_arrives_all_the_same():
    found = sent(SourceError("web", "gone", "caf\udce9.parquet"))
    assert found.path == "caf\\udce9.parquet"


@pytest.mark.parametrize(
    "lie",
    [
        [9, "system", [1, "ls"], []],
        [9, "object", [1], []],
        [9, "KeyboardInterrupt", [1], []],
        [9, "JobError", [1], []],
        [9, "DataStall", [1, "x", "no number"], []],
        [9, "ValueError", [0, 1], []],
        [9, "ValueError", [1], [1]],
        [9, "ValueError", [1]],
        [9, "ExceptionGroup", [1, "x", [0]], []],
        [9, "UnicodeDecodeError", [1, 1], []],
        [9, "JobError", [1, 5], []],
        [9, "StateMismatch", [1, {"a": 3}], []],
    ],
    ids=repr,
)
def test_an_error_that_cannot_be_is_refused(lie: list[Any]):
    with pytest.raises(FrameError):
        decode(tree(lie), [])


def test_an_error_that_is_not_known_is_not_looked_for():
    with pytest.raises(
        FrameError, match="expected a known exception with its arguments and notes, got 'system'"
    ):
        decode(tree([9, "system", [1, "ls"], []]), [])


def test_what_an_error_could_not_take_along_is_not_sent():
    assert encode(ValueError(np.arange(3), object()))[1] == []
