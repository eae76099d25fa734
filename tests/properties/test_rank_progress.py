"""The slowest rank is known without a look at all ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlord.planning.draw import RankProgress
from tests.laws import examples

SAID = st.lists(
    st.tuples(st.sampled_from(["took", "came", "went"]), st.integers(0, 5), st.integers(-1, 9)),
    max_size=60,
)


@given(SAID)
@examples(60)
def test_the_slowest_is_the_least_of_all_whoever_comes_and_goes(
    said: list[tuple[str, int, int]],
) -> None:
    paces, plain = RankProgress(), dict[int, int]()
    for what, rank, step in said:
        if what == "took":
            paces[rank] = plain[rank] = step
        elif what == "came":
            assert paces.setdefault(rank, step) == plain.setdefault(rank, step)
        else:
            assert paces.pop(rank, None) == plain.pop(rank, None)
        assert dict(paces) == plain
        if plain:
            assert paces.slowest == min(plain.values()) == RankProgress(plain).slowest
