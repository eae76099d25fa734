"""Online data mixing (ODM): weights learned from losses; a source with a higher loss gets more.

The method is Exp3, as in "Efficient Online Data Mixing".

Every reported step adds each source's loss to its reward. Weights are a softmax of the rewards,
mixed with some exploration that shrinks with time. Exp3 draws one arm a round and divides its
reward by the probability of drawing it. A step draws from all sources, so each reward is added
unchanged, which is the mean of that estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from overlord.errors import JobError
from overlord.planning import integer_math
from overlord.planning.schedule.base import (
    Base,
    Check,
    Constant,
    Feedback,
    is_real,
    shares,
    weight_problems,
)

# upper limit of a loss: keeps sums finite, and such a source would get all draws with any value
LARGEST = 1e6


@dataclass(slots=True)
class Learned:
    """What ODM has learned from reports: rewards, last losses, and counts of updates."""

    updates: int = 0
    reward: dict[str, float] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)  # the last good report of each source
    # number of invalid reports: not finite, negative, not a number
    ignored: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, repr=False)
class Odm(Base):
    kind: ClassVar[str] = "odm"
    weights: Any = None  # None: the sources' own weights
    warmup: int = 100
    floor: Any = 0.0  # least share of every source, or pairs (name, share), sorted
    scale: float = 10.0
    decay: float = 1.0
    rate: float | None = None
    metric: str = "loss"
    learned: Learned = field(default_factory=Learned, init=False, compare=False)

    def __post_init__(self) -> None:
        check = Check(self)
        if self.weights is not None:
            self._take_weights(check)
        check.whole(0, "warmup")
        check.real("a finite number of at least 1e-6", lambda x: 1e-6 <= x < math.inf, "scale")
        if self.rate is not None:
            check.real("a finite number above 0", lambda x: 0 < x < math.inf, "rate")
        check.real("a number above 0 and at most 1", lambda x: 0 < x <= 1, "decay")
        check.text("metric")
        self._take_floor(check)
        check.done()

    def _take_weights(self, check: Check) -> None:
        if callable(self.weights) and not isinstance(self.weights, Constant):
            check.found.append(
                f"weights: expected initial weights by source name, got {self.weights!r}"
            )
            return
        names = (
            self.weights
            if isinstance(self.weights, Sequence) and not isinstance(self.weights, str)
            else None
        )
        check.set(
            "weights",
            check.part("weights", self.weights if names is None else dict.fromkeys(names, 1.0)),
        )

    def _take_floor(self, check: Check) -> None:
        if not isinstance(self.floor, (Mapping, tuple)):
            check.real("a share from 0 to 1", lambda x: 0 <= x <= 1, "floor")
            share = self.floor if isinstance(self.floor, float) else 0.0
            if share * len(self.sources) > 1 + 1e-9:
                check.found.append(
                    f"floor: expected shares that sum to at most 1, got {share:g} for each of "
                    f"{len(self.sources)} sources"
                )
            return
        floors = dict(self.floor)
        wrong = [problem for problem in weight_problems(floors) if "got only zeros" not in problem]
        check.found += [f"floor{problem.removeprefix('mixture')}" for problem in wrong]
        if self.sources:
            check.found += [
                f"floor: {name!r} is not among the weights"
                for name in floors
                if name not in self.sources
            ]
        if not wrong and math.fsum(floors.values()) > 1 + 1e-9:
            check.found.append(
                f"floor: expected shares that sum to at most 1, got {math.fsum(floors.values()):g}"
            )
        check.set(
            "floor",
            floors
            if wrong
            else tuple(sorted((name, float(share)) for name, share in floors.items())),
        )

    def __call__(self, step: int, feedback: Feedback) -> dict[str, float]:
        """Update the learned state from the reports of one step, and return the new weights."""
        prior = shares(self._prior(step, feedback))
        reported = self._observe(list(prior), feedback)
        known = self.learned
        if step >= self.warmup and reported:
            self._reward(list(prior))
        return self._floored(self._mixed(prior) if known.updates and step >= self.warmup else prior)

    def _prior(self, step: int, feedback: Feedback) -> dict[str, float]:
        if self.weights is None:
            raise JobError(
                ["weights: the sources are not known outside a job; give weights={name: weight}"],
                "schedule.odm",
            )
        prior: dict[str, float] = self.weights(step, feedback)
        return prior

    def _observe(self, names: list[str], feedback: Feedback) -> bool:
        """Store valid losses and count invalid ones; return whether there was a valid one."""
        known, any_good = self.learned, False
        for name in names:
            if (key := f"{self.metric}/{name}") not in feedback:
                continue
            if is_real(loss := feedback[key]) and 0 <= loss < math.inf:
                known.loss[name], any_good = min(float(loss), LARGEST), True
            else:
                known.ignored[name] = known.ignored.get(name, 0) + 1
        return any_good

    def _reward(self, names: list[str]) -> None:
        """Update the rewards once, from the last loss of each source.

        A source that never had a report counts with the mean of the others.
        """
        known, before = self.learned, self._rewards(names)
        mean = math.fsum(known.loss.values()) / len(known.loss)
        known.reward = {
            name: before[name] * self.decay + known.loss.get(name, mean) / self.scale
            for name in names
        }
        known.updates += 1

    def _rewards(self, names: list[str]) -> dict[str, float]:
        """Return the reward of each source; one without a reward has the mean of the others."""
        known = self.learned.reward
        middle = math.fsum(known.values()) / len(known) if known else 0.0
        return {name: known.get(name, middle) for name in names}

    def _mixed(self, prior: Mapping[str, float]) -> dict[str, float]:
        """Return the weights by Exp3's rule, which starts and explores with weights ``prior``."""
        n, t, reward = len(prior), self.learned.updates, self._rewards(list(prior))
        rate = self.rate if self.rate is not None else _exploration(n, t - 1)
        explore = n * _exploration(n, t)
        top = max(reward[name] for name, p in prior.items() if p)
        lifted = {
            name: p and p * integer_math.exp_down(rate * (reward[name] - top))
            for name, p in prior.items()
        }
        return {
            name: (1 - explore) * share + explore * prior[name]
            for name, share in shares(lifted).items()
        }

    def _floored(self, weights: Mapping[str, float]) -> dict[str, float]:
        floor = (
            dict.fromkeys(weights, self.floor)
            if isinstance(self.floor, float)
            else dict(self.floor)
        )
        free = max(0.0, 1 - math.fsum(floor.values()))
        return {name: floor.get(name, 0.0) + free * weight for name, weight in weights.items()}

    def parameters(self) -> dict[str, Any]:
        given = Base.parameters(self)
        return {
            name: dict(v) if name == "floor" and isinstance(v, tuple) else v
            for name, v in given.items()
        }

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Odm:
        return replace(self, weights=Constant(weights)) if self.weights is None else self

    @property
    def takes_feedback(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        known = self.learned
        return {
            "updates": known.updates,
            "reward": dict(known.reward),
            "loss": dict(known.loss),
            "ignored": dict(known.ignored),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        numbers = {
            "reward": {str(name): float(x) for name, x in state["reward"].items()},
            "loss": {str(name): float(x) for name, x in state["loss"].items()},
        }
        if not all(math.isfinite(x) for column in numbers.values() for x in column.values()):
            raise ValueError(
                "schedule odm: expected finite rewards and losses in the state, got one that is "
                "infinite or not a number"
            )
        self.learned.updates = int(state["updates"])
        self.learned.reward, self.learned.loss = numbers["reward"], numbers["loss"]
        self.learned.ignored = {str(name): int(n) for name, n in state["ignored"].items()}


def _exploration(n: int, t: int) -> float:
    """Return Exp3's exploration share for each of n sources after t updates.

    The result is equal on every machine, since square roots are correctly rounded.
    """
    if t < 1:
        return 1 / n
    return min(1 / n, math.sqrt(integer_math.log(float(n)) / integer_math.ONE / (n * t)))


def odm(
    weights: Mapping[str, float] | Sequence[str] | None = None,
    warmup: int = 100,
    floor: float | Mapping[str, float] = 0.0,
    scale: float = 10.0,
    decay: float = 1.0,
    rate: float | None = None,
    metric: str = "loss",
) -> Odm:
    """Return a schedule that draws more from sources with a higher loss.

    Trainers report the losses: ``client.report(step, {"loss/web": 2.31, ...})``; ``metric`` is the
    part before the slash.

    ``weights`` are those of the first ``warmup`` steps and of later exploration; a list of names
    means equal weights. ``floor``: the least share of each source. A loss counts as
    ``loss / scale``. ``decay`` below 1 reduces the effect of older losses. ``rate`` fixes the
    learning rate, which otherwise falls with the number of reports. Invalid losses are ignored and
    counted.
    """
    return Odm(weights, warmup, floor, scale, decay, rate, metric)
