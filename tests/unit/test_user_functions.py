"""Functions of the user are looked at before they are called, also those that cannot be
remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from overlord.checks import signature_problem


@dataclass
class Cost:
    """As users write them: with values, and so without a hash."""

    factors: list[float] = field(default_factory=list)

    def __call__(self, columns: Any) -> Any:
        return columns


def test_a_callable_without_a_hash_is_looked_at_as_any_other() -> None:
    assert signature_problem(Cost(), ("columns",)) == ""
    assert (
        signature_problem(Cost(), ("a", "b"))
        == "expected a function of (a, b), got Cost(columns: 'Any') -> 'Any'"
    )


def test_the_answer_is_that_of_the_arguments_that_were_asked_for() -> None:
    def one(x: Any) -> Any:
        return x

    assert [
        signature_problem(one, ("x",)) == "",
        signature_problem(one, ("x", "y")) == "",
        signature_problem(one, ("x",)) == "",
    ] == [True, False, True]
