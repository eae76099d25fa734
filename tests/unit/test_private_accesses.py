"""Tests and benchmarks use the public interface, or the accessors of ``tests/internals.py``."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import internals
from tests.internals import Seam

ROOT = Path(__file__).resolve().parents[2]
ACCESSORS = ROOT / "tests/internals.py"
# Names of Python, torch, torchtitan, Ray and Accelerate, and the methods of every named tuple.
OTHERS = {
    "_compiled_flex_attn",
    "_get_available_device_type",
    "_utils",
    "_create_node_with_resources_and_labels",
    "_dynamo",
    "_exit",
    "_global_node",
    "_is_gil_enabled",
    "_make",
    "_new_shared",
    "_replace",
    "_reset_state",
    "_run_exitfuncs",
    "_shutdown_workers",
    "_sleep",
}
# This table may only shrink. Functions are imported by name to be tested alone; classes are those
# that the simulation and the dry run replace a part of.
REMAINING = {
    ("benchmarks/journal.py", "session.internals"),
    ("benchmarks/recovery.py", "session.internals"),
    ("benchmarks/recovery.py", "session.internals.runtime._parts"),
    ("tests/properties/test_cores.py", "_at_or_after"),
    ("tests/simulation/world/disk.py", "_Order"),
    ("tests/simulation/world/memoization.py", "_Window"),
    ("tests/torch/test_world.py", "_Board"),
