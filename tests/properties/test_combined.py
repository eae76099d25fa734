"""Everything at once: features that were built apart, in one job, with people who change it in
mid-run. Still one stream.

Each example is a small random job with look-ahead or deferring, a mixture that may learn and
choose, hooks, sources that join, skips and changes of weights; it is run twice under other timings
and options, and restored behind every step.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.dryrun.virtual_run import Add, Run
from overlord.hashing import key64, keyed_hash
from overlord.messages.control import SetMixture, Skip
from tests.laws import examples
from tests.properties.test_feedback import Chaser, some, trainer
from tests.properties.test_look_ahead import Taste
from tests.properties.test_stream import fingerprint, in_order
from tests.worlds import World, folder, worlds

LAG = 7


class Fickle(Chaser):
    """Learns, and chooses by what it learned: a choice that is asked for once too often, or not
    saved, shows.
    """

    def prefer(self, step: int, candidates: ov.Buffer) -> np.ndarray:
        self.seen[self.names[0]] += 0.125
        tastes = keyed_hash(
            key64("fickle"),
            candidates.row,
            np.full(len(candidates), int(8 * self.seen[self.names[0]])),
        )
        return (tastes % np.uint64(5)).astype(float)


def shifted(samples: ov.Popped) -> ov.Ragged:
    """A loader hook that changes every token by chance."""
    noise = (samples.chance("shift") * 3).astype(np.int64) + samples.step % 2
    return ov.Ragged(samples.tokens.values + noise, samples.tokens.offsets)


@dataclass(frozen=True)
class Scene:
    """What is combined; Hypothesis prints it."""

    world: World
    ahead: tuple[tuple[str, Any], ...]
    mixture: str
    mix_every: str
    hooked: bool
    events: tuple[tuple[Any, ...], ...]  # (what, step, value)
    salt: int

    def job(self, directory: str) -> tuple[ov.Job, ov.Job, list[Any]]:
        """The job as it begins, as it is listed to be resumed, and what is said in mid-run."""
        joining = sum(what == "join" for what, *_ in self.events)
        more = tuple(
            ("jsonl", 9 + 8 * k, 2, 0.75, 2 - k % 2, True, "picky") for k in range(joining)
        )
        sources = replace(self.world, sources=(*self.world.sources, *more)).job(directory).sources
        first = sources[: len(self.world.sources)]
        hooks = [ov.loader_do_plan(shifted)] if self.hooked else []
        mixture = self._mixture({s.name: s.weight for s in first})
        fields = {
            "mix_every": self.mix_every,
            "feedback_lag": LAG,
            "hooks": hooks,
            "mixture": mixture,
            **dict(self.ahead),
        }
        job = self.world.job(directory, sources=first, **fields)
        return job, replace(job, sources=sources), self._said(list(sources[len(first) :]))

    def _mixture(self, weights: dict[str, float]) -> Any:
        chooses = dict(self.ahead).get("look_ahead", 1) > 1
        if self.mixture == "learns":
            return (Fickle if chooses else Chaser)(tuple(weights))
        if self.mixture == "odm":
            return (
                ov.schedule.length_warmup(3, 30, 6, ov.schedule.odm(weights, warmup=1))
                if chooses
                else ov.schedule.odm(warmup=1)
            )
        return Taste(weights, "whim") if chooses and self.mixture == "taste" else None

    def _said(self, joining: list[ov.Source]) -> list[Any]:
        made: list[Any] = []
        for what, step, value in self.events:
            if what == "mix":
                made.append(
                    SetMixture(step, {"s0": 1.0, f"s{value % len(self.world.sources)}": value / 2})
                )
            elif what == "skip":
                made.append(Skip(tuple(range(step, step + value))))
            else:
                made.append(Add(joining.pop(0), step, loaders=1 + value % 2))
        return made


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    world = draw(worlds(batches="samples"))
    look = st.tuples(st.integers(2, 4), st.integers(1, 4)).map(
        lambda c: (("look_ahead", c[0]), ("max_age", c[1]))
    )
    ahead = draw(st.one_of(look, st.just((("overflow", "defer"),)), st.just(())))
    events = st.tuples(
        st.sampled_from(("mix", "skip", "join")), st.integers(0, 6), st.integers(1, 4)
    )
    return Scene(
        world,
        ahead,
        draw(st.sampled_from(("own", "taste", "learns", "odm"))),
        draw(st.sampled_from(("step", "microbatch", "epoch"))),
        draw(st.booleans()),
        tuple(draw(st.lists(events, max_size=4))),
        draw(st.integers(0, 2**20)),
    )


def listed(run: Run) -> Counter[Any]:
    return Counter((q.source, q.epoch, q.file, q.row, q.reason) for q in run.quarantine)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state without reports: those of the last steps are in it or not yet, as it happens."""
    return {key: value for key, value in json.loads(json.dumps(state)).items() if key != "reports"}


@given(scenes())
@examples(16)
def test_neither_timing_nor_options_nor_a_restart_shows_in_a_job_that_uses_everything(
    scene: Scene,
) -> None:
    with folder() as directory:
        job, wider, events = scene.job(directory)
        salt, say = scene.salt, trainer(scene.salt)
        whole = ov.simulate(
            job, seed=salt, report=say, events=events, prefetch=LAG - 2, save=True, check=True
        )
        other = {
            "prefetch": 1 + salt % (LAG - 2),
            "loaders": dict.fromkeys(job.names, 1 + salt % 3),
            "read_ahead": 1 + salt % 2,
        }
        again = ov.simulate(
            job, seed=salt + 1, report=say, events=events, save=True, check=True, **other
        )
        assert (fingerprint(again.steps), type(again.error)) == (
            fingerprint(whole.steps),
            type(whole.error),
        )
        assert again.quarantine == whole.quarantine
        assert list(map(plain, again.states.values())) == list(map(plain, whole.states.values()))
        ids = [sample for step in whole.steps[0] for sample in in_order(step.info)]
        assert len(set(ids)) == len(ids), "drawn twice"
        for k, step in some(whole):
            state = json.loads(json.dumps(whole.states[step.step]))
            rest = ov.simulate(
                wider, seed=salt + k, resume=state, report=say, save=True, check=True, **other
            )
            where = f"restored after step {step.step}"
            assert fingerprint(rest.steps) == fingerprint(
                {r: s[k + 1 :] for r, s in whole.steps.items()}
            ), where
            assert type(rest.error) is type(whole.error), where
            assert [plain(s) for s in rest.states.values()] == [
                plain(s) for s in list(whole.states.values())[k + 1 :]
            ], where
            before = sum(state["counts"]["quarantined"].values())
            assert listed(rest) <= listed(whole), where
            assert before + listed(rest).total() == listed(whole).total(), where


@given(scenes(), st.integers(1, 4))
@examples(12)
def test_on_another_mesh_the_same_samples_come_in_every_step_also_where_weights_are_learned_and_changed(
    scene: Scene, dp: int
) -> None:
    """One rank reports for all, as ranks of another mesh measure other things; what gives up equal
    steps across meshes is left out.
    """
    with folder() as directory:
        job, wider, events = replace(scene, ahead=()).job(directory)
        say = trainer(scene.salt)

        def run(made: ov.Job, **options: Any) -> list[Any]:
            done = ov.simulate(
                made,
                seed=scene.salt,
                report=lambda rank, step: say(0, step) if rank == 0 else None,
                prefetch=4,
                **options,
            )
            states.append(done.states)
            return [(step.step, in_order(step.info)) for step in done.steps[0]]

        states: list[dict[int, dict[str, Any]]] = []
        mesh = ov.ClientPlaceTree(dp=dp)
        whole = run(job, events=events, save=True)
        assert run(replace(job, place=mesh), events=events) == whole
        for k in range(0, len(whole), 1 + len(whole) // 3):
            state = json.loads(json.dumps(states[0][whole[k][0]]))
            assert run(replace(wider, place=mesh), resume=state) == whole[k + 1 :], (
                f"restored after step {whole[k][0]}"
            )
