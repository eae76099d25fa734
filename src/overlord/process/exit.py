"""Immediate exit of a process: no exit handlers, no flush of buffers, no wait for threads."""

from __future__ import annotations

from os import _exit as exit_now

__all__ = ["exit_now"]
