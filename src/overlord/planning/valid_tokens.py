"""The number of valid tokens of a step: the sum of the weights of all labels. Pure."""

from __future__ import annotations

from math import fsum

import numpy as np

from overlord.plan.plan import LoadingPlan
from overlord.planning.images import ENCODER
from overlord.sample import Column, Ragged


def valid_tokens(
    plan: LoadingPlan, weights: Column | None, images: bool, labels: str = "shifted"
) -> int | float:
    """Return the sum of the weights of all labels of a step, over all ranks.

    ``weights``: metadata ``loss_weights`` of the plan's samples; a sample without an entry has the
    weight 1 on every label. The sum is rounded once, so it does not depend on the order of samples.
    It is an int if it is whole. ``images``: whether the job's images are encoded.
    """
    if not isinstance(weights, Ragged) or not len(weights.values):
        return labels_of(plan, np.ones(len(plan), bool), images, labels)
    flat = weights.values[weights.offsets[0] : weights.offsets[-1]]
    plain = labels_of(plan, weights.lengths == 0, images, labels)
    found = fsum([*flat.tolist(), plain])
    return int(found) if found.is_integer() else found


def labels_of(plan: LoadingPlan, plain: np.ndarray, images: bool, labels: str = "shifted") -> int:
    """Return the number of labels of those samples of a plan that the mask ``plain`` marks.

    Every token is a label except the first of each document and placeholders of images, which are
    not predicted. A shifted label may be the token after a piece of a sample.
    """
    tokens = plan.payload_tokens if labels == "shifted" else plan.tokens
    counts = 1 if plan.documents is None else plan.documents.counts[plain]
    found = int(np.maximum(tokens[plain] - counts, 0).sum())
    a = plan.modules.get(ENCODER) if images else None
    if a is None or a.out is None or a.offset is None:
        return found
    mine = plain[a.sample]
    # the first token of a document is never predicted
    first = (a.offset == 0) & (a.out > 0) & mine
    return found - int(a.out[mine].sum()) + int(first.sum())
