"""Strategies that end the process they run in. A module without pytest: the planner's process imports it."""

from __future__ import annotations

import os
from typing import Any

from overlord.planner.strategy import llm_balance

FATAL_STEP = 6


def deadly(buffer: Any, place: Any) -> Any:
    """Crashes whoever plans that step, every time."""
    if buffer.step == FATAL_STEP:
        os._exit(3)
    return llm_balance(buffer, place)
