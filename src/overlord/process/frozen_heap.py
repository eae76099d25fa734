"""The last module that the fork server loads: it exempts all loaded objects from garbage collection
in every child. Pages that no process writes to stay shared.
"""

from __future__ import annotations

import gc

gc.freeze()
