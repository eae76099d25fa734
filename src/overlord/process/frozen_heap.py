"""The last module that the fork server loads: it freezes the heap.

All loaded objects are exempt from garbage collection in every child. So their pages are not written
and stay shared.
"""

from __future__ import annotations

import gc

gc.freeze()
