"""The seconds of a step from its plan: loads by rank and GPU, and which of them wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from endtoend.pipeline import one_f_one_b
from endtoend.setups import CARD_FLOPS, Pair, Setup
from overlord.plan.plan import LoadingPlan

BACKWARD = 2.0  # times the forward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """The forward FLOPs of one step."""

    backbone: np.ndarray  # [rank, microbatch]
    encoder: (
        np.ndarray
    )  # [rank, card of the rank, microbatch]; one microbatch where the encoder runs once a step
    # images may be encoded by other ranks: everyone waits for the encoder before the backbone goes
    # on
    exchanged: bool

    @property
    def total(self) -> float:
        return float(self.backbone.sum() + self.encoder.sum())


def loads_of(plan: LoadingPlan, pair: Pair, setup: Setup, *, exchanged: bool) -> Loads:
    """Return the loads of a plan, computed from lengths: its costs may be of another model."""
    main, images = plan.main, plan.modules["encoder"]
    tokens = pair.llm({"tokens": plan.tokens[main.sample]})
    backbone = np.bincount(
        main.bins(), weights=tokens, minlength=main.n_buckets * main.n_microbatches
    )
    patches = pair.vit({"image_patches": images.size})
    by_card = np.bincount(
        images.bins(), weights=patches, minlength=images.n_buckets * images.n_microbatches
    )
    by_card = by_card.reshape(images.n_buckets, images.n_microbatches)
    cards = np.array(setup.place.buckets("DP"))  # [rank, card of the rank]
    return Loads(
        backbone=backbone.reshape(main.n_buckets, main.n_microbatches),
        encoder=by_card[cards],
        exchanged=exchanged,
    )


def seconds(loads: Loads, setup: Setup, encoder: str = "own group") -> float:
    """Return the time of a step.

    ``encoder``: which GPUs encode images that stay (``setups.ENCODERS_UNPLANNED``).
    """
    if setup.sync == "1F1B":
        flops = _pipelined(loads, setup, encoder)
    else:
        flops = (1 + BACKWARD) * _meeting(
            loads.backbone / setup.tp,
            _slowest(loads, setup, encoder),
            loads,
            setup.sync == "microbatch",
        )
    return flops / CARD_FLOPS


def _slowest(loads: Loads, setup: Setup, encoder: str) -> np.ndarray:
    """Return the encoder time by [rank, microbatch]: that of the slowest GPU of the rank."""
    if (
        encoder == "replicated"
    ):  # every card of a tensor-parallel group encodes all of the rank's images
        return loads.encoder.sum(axis=1)
    if (
        encoder == "stage 0"
        # cards are numbered stage by stage; what was dealt out in turn to all goes to the first
        # stage's
        # in turn
    ):
        ranks, _, m = loads.encoder.shape
        return loads.encoder.reshape(ranks, setup.pp, setup.tp, m).sum(axis=1).max(axis=1)
    return loads.encoder.max(axis=1)


def _meeting(backbone: np.ndarray, encoder: np.ndarray, loads: Loads, each: bool) -> float:
    """Return the time if ranks wait for each other after ``each`` microbatch, or once."""
    if not loads.exchanged:
        assert encoder.shape == backbone.shape, (
            "images that stay are encoded before their microbatch"
        )
        both = encoder + backbone
        return float(both.max(axis=0).sum() if each else both.sum(axis=1).max())
    encoded = _exchanged(loads, each)
    return encoded + float(backbone.max(axis=0).sum() if each else backbone.sum(axis=1).max())


def _exchanged(loads: Loads, each: bool) -> float:
    """Return the encoder time if every GPU waits for all: by microbatch, or once per step."""
    by_card = loads.encoder.reshape(-1, loads.encoder.shape[2])
    return float(by_card.max(axis=0).sum() if each else by_card.sum(axis=1).max())


def _pipelined(loads: Loads, setup: Setup, encoder: str) -> float:
    """Return the time if every rank is a pipeline, and all wait for each other at the end.

    The encoder runs on the first stage, or before the step on all GPUs. In the second case it
    follows the plan, microbatch by microbatch or all at once; GPUs that share a microbatch wait for
    each other.
    """
    stage = loads.backbone[:, None, :] / (setup.tp * setup.pp)
    forward = np.repeat(stage, setup.pp, axis=1)
    if encoder in ("replicated", "stage 0"):
        forward[:, 0] += _slowest(loads, setup, encoder)
        return float(one_f_one_b(forward, BACKWARD * forward).max())
    ends = one_f_one_b(forward, BACKWARD * forward)
    if loads.exchanged:
        return (1 + BACKWARD) * _exchanged(loads, True) + float(ends.max())
    ahead = (1 + BACKWARD) * loads.encoder.max(axis=1).sum(axis=1)
    return float((ahead + ends).max())
