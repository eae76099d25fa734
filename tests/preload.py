"""Modules that the fork server of the tests imports once, for all workers that it starts.

Tests send functions to workers. Their modules would otherwise be imported in each worker. Nothing
here starts a thread.
"""

from __future__ import annotations

import gc
import importlib

import pyarrow as pa

for name in (
    "numpy.ma",
    "overlord.transforms.image_decode",
    "tests.fatal_functions",
    "tests.images",
    "tests.properties.test_combined",
    "tests.scenarios.test_images",
    "tests.scenarios.test_process",
    "tests.worlds",
):
    importlib.import_module(name)

# At the first column of Python values pyarrow imports pandas, where that is installed.
pa.array([0])
gc.freeze()
