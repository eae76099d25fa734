"""For the fork server alone: at its first conversion pyarrow imports pandas, where that is installed. Once there, and not in every host,
where it takes a third of a second and pages that nobody else shares."""

from __future__ import annotations

import pyarrow as pa

pa.array([0])
