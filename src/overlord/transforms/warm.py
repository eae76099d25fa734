"""For the fork server alone, and the last that it imports: at its first conversion pyarrow imports pandas, where that is installed. Once
there, and not in every host, where it takes a third of a second and pages that nobody else shares."""

from __future__ import annotations

import gc

import pyarrow as pa

pa.array([0])
gc.freeze()  # nobody looks through it again, neither at work nor at its end
