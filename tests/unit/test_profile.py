"""Profiles: what is kept of what sources cost, as values and as files that nobody may trust
blindly.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.scaling.profile import BadProfile, JobProfile, SourceProfile, cdf
from tests.laws import examples


def profile(name: str = "web", **fields: Any) -> SourceProfile:
    usual = {
        "fingerprint": "f0",
        "samples": 100,
        "read_s": 1e-5,
        "transform_s": 3e-4,
        "tokens": 310.0,
        "transfer_s": 1e-6,
    }
    return SourceProfile(name=name, **{**usual, "buffer_bytes": 900, "file_bytes": 100, **fields})


@st.composite
def profiles(draw: st.DrawFn, name: str = "web") -> SourceProfile:
    numbers, whole = st.floats(0, 1e6), st.integers(0, 2**50)
    fields = {n: draw(numbers) for n in ("read_s", "transform_s", "tokens", "transfer_s")}
    fields |= {n: draw(whole) for n in ("samples", "buffer_bytes", "file_bytes")}
    return SourceProfile(name=name, fingerprint=draw(st.text(max_size=5)), **fields)


@st.composite
def jobs(draw: st.DrawFn) -> JobProfile:
    names = draw(st.lists(st.text(max_size=6), unique=True, max_size=6))
    return JobProfile.of([draw(profiles(name)) for name in names], draw(st.text(max_size=9)))


@given(jobs())
@examples(60)
def test_a_profile_comes_back_from_json_as_it_was(job: JobProfile) -> None:
    assert JobProfile.from_plain(json.loads(json.dumps(job.to_plain()))) == job


@given(jobs(), st.data())
@examples(80)
def test_a_profile_in_which_anything_was_changed_is_refused(
    job: JobProfile, data: st.DataObject
) -> None:
    text = json.dumps(job.to_plain())
    at = data.draw(st.integers(0, len(text) - 1))
    other = (
        text[:at]
        + data.draw(st.sampled_from('0159"{}[],:ax'))
        + text[at + data.draw(st.integers(0, 3)) :]
    )
    try:
        changed = json.loads(other)
    except ValueError:
        return
    if changed == json.loads(text):
        return
    with pytest.raises(BadProfile):
        JobProfile.from_plain(changed)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    )
)
@examples(60)
def test_what_is_no_profile_at_all_is_refused_in_words(value: Any) -> None:
    with pytest.raises(BadProfile, match="expected"):
        JobProfile.from_plain(value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"read_s": -1.0},
            "profile of source 'web': read_s: expected a finite number of at least 0, got -1.0",
        ),
        ({"tokens": math.nan}, "tokens: expected a finite number"),
        ({"transform_s": math.inf}, "transform_s: expected a finite number"),
        ({"samples": 1.5}, "samples: expected a whole number"),
        ({"samples": True}, "samples: expected a whole number"),
        ({"file_bytes": 2**70}, "file_bytes: expected a whole number"),
        ({"fingerprint": None}, "fingerprint: expected text, got None"),
        ({"transfer_s": "1"}, "transfer_s: expected a finite number of at least 0, got '1'"),
    ],
)
def test_an_impossible_profile_cannot_be_made(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadProfile, match=says):
        profile(**fields)


def test_a_file_that_lies_about_a_field_is_refused_though_its_sum_is_right() -> None:
    from overlord.scaling.profile import _sum

    plain = JobProfile.of([profile()]).to_plain()
    plain["sources"][0]["samples"] = -3
    with pytest.raises(BadProfile, match="expected the checksum of its values, got another one"):
        JobProfile.from_plain(plain)
    plain["sum"] = _sum({k: v for k, v in plain.items() if k != "sum"})
    with pytest.raises(BadProfile, match="samples: expected a whole number"):
        JobProfile.from_plain(plain)


def test_cost_by_token_follows_from_cost_by_sample() -> None:
    assert profile().sample_s == pytest.approx(3.1e-4)
    assert profile().token_s == pytest.approx(1e-6)
    assert profile(tokens=0.0).token_s == 0.0
    assert profile().memory == 1000


@given(profiles(), profiles(), st.floats(0.01, 1))
@examples(60)
def test_a_refresh_lies_between_what_was_and_what_is(
    old: SourceProfile, new: SourceProfile, weight: float
) -> None:
    old, new = (
        replace(old, samples=1 + old.samples),
        replace(new, samples=1 + new.samples, fingerprint=old.fingerprint),
    )
    both = old.merged(new, weight)
    for n in ("read_s", "transform_s", "tokens"):
        low, high = sorted((getattr(old, n), getattr(new, n)))
        assert low * (1 - 1e-9) <= getattr(both, n) <= high * (1 + 1e-9)
    assert both.samples == old.samples + new.samples
    same = old.merged(old, weight)
    assert same.read_s == pytest.approx(old.read_s)
    assert abs(same.file_bytes - old.file_bytes) <= 1


def test_what_was_not_measured_keeps_what_was_known() -> None:
    assert profile().merged(profile(transfer_s=0.0, file_bytes=0, buffer_bytes=1900)) == profile(
        samples=200, buffer_bytes=1200
    )
    assert profile(samples=0).merged(profile()) == profile()
    assert profile().merged(profile(samples=0, read_s=9.0)) == profile()


def test_of_other_files_or_another_machine_nothing_is_averaged() -> None:
    new = profile(fingerprint="f1", read_s=7.0)
    assert profile().merged(new) == new
    here = JobProfile.of([profile(), profile("code")], "here")
    there = here.merge(JobProfile.of([profile(read_s=7.0)], "there"))
    assert (there.machine, there.sources["web"].read_s, there.sources["code"]) == (
        "there",
        7.0,
        profile("code"),
    )


def test_only_profiles_of_the_sources_as_they_are_count() -> None:
    job = JobProfile.of(
        [profile("a"), profile("b", fingerprint="old"), profile("c", samples=0), profile("d")]
    )
    assert list(job.known({"a": "f0", "b": "f0", "c": "f0"}).sources) == ["a"]


def test_share_of_file_state_and_distribution_over_sources() -> None:
    job = JobProfile.of([profile("a"), profile("b", file_bytes=300, buffer_bytes=700)])
    assert job.file_share() == pytest.approx(0.2)
    assert JobProfile().file_share() == 0.0
    x, share = cdf([3.0, 1.0, 2.0, 2.0])
    assert x.tolist() == [1.0, 2.0, 2.0, 3.0]
    assert share.tolist() == [0.25, 0.5, 0.75, 1.0]
