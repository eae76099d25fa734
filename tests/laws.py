"""The number of examples for a property: one number for the suite, which a property scales."""

from __future__ import annotations

import os

from hypothesis import settings

USUAL = 60  # the number that ``examples`` is relative to
EXAMPLES = int(os.environ.get("OVERLORD_EXAMPLES", "40"))  # the usual number in this run


def examples(n: int) -> settings:
    """Return settings for ``n`` examples, scaled to the usual number of this run."""
    return settings(max_examples=max(1, n * EXAMPLES // USUAL))
