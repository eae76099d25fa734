"""The last module that the fork server loads: it freezes the heap.

The garbage collector of a child then never visits the loaded objects. So it does not write their
pages, and these stay shared.
"""

from __future__ import annotations

import gc

gc.freeze()
