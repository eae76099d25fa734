"""Loaded once by the fork server of the tests, for all hosts that it starts: functions of tests are
sent to them, and what their modules import would otherwise be imported again in each. Nothing here
starts a thread.
"""

from __future__ import annotations

import gc
import importlib

import pyarrow as pa

for name in (
    "numpy.ma",
    "overlord.transforms.image_decode",
    "tests.deadly",
    "tests.images",
    "tests.properties.test_combined",
    "tests.scenarios.test_images",
    "tests.scenarios.test_process",
    "tests.worlds",
):
    importlib.import_module(name)

pa.array(
    [0]
)  # at the first column of Python values pyarrow imports pandas, where that is installed
gc.freeze()
