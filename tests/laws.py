"""How many examples a law is tried on: one number for the suite, in which a law says what share of
it it needs.
"""

from __future__ import annotations

import os

from hypothesis import settings

USUAL = 60  # examples of a law that says nothing, where laws say how many they need
EXAMPLES = int(os.environ.get("OVERLORD_EXAMPLES", "40"))  # the same in this run


def examples(n: int) -> settings:
    """So many where 60 are usual."""
    return settings(max_examples=max(1, n * EXAMPLES // USUAL))
