"""Immediate end of a process, without handlers, buffers or other threads."""

from __future__ import annotations

from os import _exit as exit_now

__all__ = ["exit_now"]
