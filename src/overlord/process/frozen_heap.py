"""The last of what the fork server loads for hosts: no collector looks through it again, in any of
them, at work or at the end. Pages that nobody writes to stay shared.
"""

from __future__ import annotations

import gc

gc.freeze()
