"""Classification of errors of object stores: transient or permanent, and their remedies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from overlord.sources.base import StorageUnreachable
from overlord.sources.retry import FEW_ATTEMPTS, UNLIMITED, Failure, attempts_text, kinds_text
from overlord.uris import scrub

_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Za-z -]+))?")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_KIND = re.compile(r"\bkind: (\w+)")
_PASSING = {
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "InternalError",
    "ServiceUnavailable",
    "OperationAborted",
    "ConditionalRequestConflict",
}
_SHOWN = 300  # characters of a library's text

_UNDER_RUN = "training data must not change under a run; restore it, or start a new run"
_KEYS = (
    "check the keys and their permissions; they come from the environment (AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY, ...)"
)
_RANGES = (
    "something between here and the store does not serve ranges of objects; read from the "
    "store itself"
)


class WrongResponse(Exception):
    """A request succeeded, but the response does not hold the requested bytes."""

    def __init__(self, kind: str, problem: str):
        super().__init__(kind, problem)
        self.kind, self.problem = kind, problem


def classify(error: Exception) -> Failure:
    """Classify an error of the library by its text, since it has few classes."""
    if isinstance(error, WrongResponse):
        return _wrong(error)
    text, shown = str(error), _first_line(str(error))
    status, code = _STATUS.search(text), (_CODE.search(text) or ["", ""])[1]
    if isinstance(error, StorageUnreachable):
        return Failure(error.kind, error.problem, error.remedy, 1)
    if "non-partial response" in text:
        return Failure(
            "whole object", "expected a range, got the whole object", _RANGES, FEW_ATTEMPTS
        )
    if "UnexpectedRange" in text:
        return Failure("other range", shown, _RANGES, FEW_ATTEMPTS)
    if "BadScheme" in text:
        return Failure(
            "setup",
            "the endpoint is plain http, which is not allowed",
            "set AWS_ALLOW_HTTP=true to allow it",
            1,
        )
    if "169.254.16" in text or "metadata.google" in text:
        return Failure(
            "denied",
            "the environment has no keys, and this machine has no role that gives some",
            _KEYS,
            FEW_ATTEMPTS,
        )
    if status is not None:
        return _by_status(
            int(status[1]),
            code,
            f"{status[1]} {(status[2] or '').strip()}{f', {code}' if code else ''}",
        )
    if isinstance(error, FileNotFoundError):
        return Failure("gone", shown, _UNDER_RUN, 1)
    kinds = _KIND.findall(text)
    if "Timeout" in kinds or "TimedOut" in text:
        return Failure("timeout", "no byte received for too long")
    if "IncompleteBody" in text or "UnexpectedEof" in kinds:
        return Failure("short body", "the response ended early")
    if {"Interrupted", "Connect"} & set(kinds):
        return Failure("connection", shown)
    return Failure(type(error).__name__, shown, tries=FEW_ATTEMPTS)


def classify_mid_run(error: Exception) -> Failure:
    """Classify an error of a running job.

    The object existed when it was indexed, so it may come back. Keys may be renewed.
    """
    failure = classify(error)
    return (
        replace(failure, tries=UNLIMITED)
        if failure.kind in ("gone", "changed", "denied")
        else failure
    )


def _by_status(status: int, code: str, shown: str) -> Failure:
    if status in (408, 429) or (status >= 500 and status != 501) or code in _PASSING:
        return Failure(str(status), shown)
    if status == 404:
        return Failure(
            "gone",
            shown,
            "check the name of the bucket" if code == "NoSuchBucket" else _UNDER_RUN,
            1,
        )
    if status in (412, 416):  # no read goes past the end in the index
        return Failure("changed", shown, _UNDER_RUN, 1)
    if status in (401, 403) or code in ("ExpiredToken", "InvalidToken"):
        return Failure("denied", shown, _KEYS, 1)
    if 300 <= status < 400:
        return Failure(
            "setup",
            shown,
            "the bucket lies in another region: set AWS_REGION, or ?region= in the URI",
            1,
        )
    return Failure(
        str(status), shown, "the store refuses the request; check endpoint, bucket and region", 1
    )


def _wrong(error: WrongResponse) -> Failure:
    if error.kind == "changed":
        return Failure("changed", error.problem, _UNDER_RUN, 1)
    if error.kind == "other range":
        return Failure(error.kind, error.problem, _RANGES, FEW_ATTEMPTS)
    return Failure(error.kind, error.problem)


def give_up_error(
    path: str, operation: str, failures: Sequence[Failure], took_s: float
) -> StorageUnreachable:
    """Return the error after the last attempt: operation, attempts, duration, causes and remedy."""
    last, tried = failures[-1], attempts_text(failures, took_s)
    if last.kind == "gone":
        return StorageUnreachable(
            f"the object is gone or was never there ({last.text}){tried}", last.remedy, last.kind
        )
    if last.kind == "changed":
        return StorageUnreachable(
            f"the object changed since it was indexed ({last.text}){tried}", last.remedy, last.kind
        )
    return StorageUnreachable(
        f"could not be {operation}{tried}: {last.text}" + kinds_text(failures),
        last.remedy,
        last.kind,
    )


def _first_line(text: str) -> str:
    """Return the first line of the library's text, without its dump of the request."""
    line = " ".join(text.split("\nDebug source", 1)[0].split())
    return scrub(line)[:_SHOWN]
