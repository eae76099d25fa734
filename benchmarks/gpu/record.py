"""Results that are saved as soon as they exist, and cells that a limit of time leaves out."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


class Record:
    """Rows of all parts. Every change is written to a JSON file and printed.

    ``budget``: seconds from the creation of the record.
    """

    def __init__(self, path: Path | None, budget: float, **about: Any):
        self._path, self._budget, self._began = path, budget, time.perf_counter()
        self.data: Row = {**about, "rows": {}, "not_run": [], "errors": [], "seconds": {}}
        self._save()

    def now(self) -> float:
        """Return the seconds since the record was created."""
        return time.perf_counter() - self._began

    def left(self, until: float = 1.0) -> float:
        """Return the seconds to a share of the budget."""
        return until * self._budget - self.now()

    def rows(self, part: str) -> list[Row]:
        return self.data["rows"].get(part, [])

    def about(self, **facts: Any) -> None:
        self.data.update(facts)
        self._save()

    def add(self, part: str, row: Row) -> None:
        self.data["rows"].setdefault(part, []).append(row)
        shown = {k: v for k, v in row.items() if not isinstance(v, list | dict)}
        self.say(f"{part}: " + ", ".join(f"{k} {_short(v)}" for k, v in shown.items()))
        self._save()

    def say(self, line: str) -> None:
        print(f"{self.now():6.1f} s  {line}", flush=True)

    def attempt(
        self,
        name: str,
        work: Callable[..., Any],
        *given: Any,
        expected: float = 0.0,
        until: float = 1.0,
    ) -> Any:
        """Return ``work(*given)``; None if it has no time left, or fails.

        Both are recorded by name. ``expected``: its seconds. ``until``: a share of the budget.
        """
        if expected > self.left(until):
            why = f"expected {expected:.1f} s, left {self.left(until):.1f} s"
            self.data["not_run"].append({"name": name, "why": why})
            self.say(f"not run: {name} ({why})")
            self._save()
            return None
        began = self.now()
        try:
            return work(*given)
        except Exception as e:
            text = f"{type(e).__name__}: {e}".splitlines()[0][:300]
            self.data["errors"].append({"name": name, "error": text})
            self.say(f"failed: {name}: {text}\n{traceback.format_exc(limit=-4)}")
            return None
        finally:
            part = name.split(",")[0]
            spent = self.data["seconds"]
            spent[part] = round(spent.get(part, 0.0) + self.now() - began, 2)
            self._save()
            if torch.cuda.is_available() and torch.cuda.memory_reserved() > 100 << 30:
                torch.cuda.empty_cache()

    def _save(self) -> None:
        if self._path is not None:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.data), encoding="utf-8")
            temporary.replace(self._path)


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
