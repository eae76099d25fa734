"""Listing of the data files that the user named: folders, files, patterns and URIs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from overlord.discovery.data_groups import (
    DataGroup,
    Listing,
    clean_name,
    divide,
    format_by_name,
    usable,
)
from overlord.errors import SourceError
from overlord.sources.files import Files
from overlord.sources.formats import SUFFIXES, known_formats
from overlord.uris import is_uri, scrub


def list_data(paths: Sequence[str]) -> Listing:
    """Return the sources of all paths. Files of one folder that are named singly are divided too.

    Raises SourceError for a path that does not exist.
    """
    out = Listing()
    single: dict[str, list[str]] = {}  # folder -> files that were named one by one
    for path in paths:
        if is_uri(path):
            out.groups.append(_remote(path))
            continue
        at = os.path.abspath(os.path.expanduser(path))
        if os.path.isdir(at):
            _add_folder(out, at)
        elif os.path.exists(at):
            single.setdefault(os.path.dirname(at), []).append(_known(at))
        else:
            _, found = Files.resolve(path, source="init", suffixes=SUFFIXES)
            for file in found:
                single.setdefault(os.path.dirname(file.path), []).append(_known(file.path))
    for folder, files in single.items():
        whole = _with_halves(files)
        for group in divide(folder, os.path.basename(folder) or "data", whole):
            out.groups.append(replace(group, named=True))
    return out


def _known(path: str) -> str:
    if not format_by_name(path):
        raise SourceError(
            "init",
            "expected a file name with a known suffix, got another one",
            path,
            f"rename it, or write the job by hand with format=; {known_formats()}",
        )
    return path


def _with_halves(files: Sequence[str]) -> list[str]:
    """Return the files, with the other half of each Megatron dataset."""
    found = dict.fromkeys(files)
    for path in files:
        other = path[:-4] + {".bin": ".idx", ".idx": ".bin"}.get(path[-4:].lower(), "")
        if other != path and os.path.exists(other):
            found[other] = None
    return list(found)


def _add_folder(out: Listing, folder: str) -> None:
    files: list[str] = []

    def failed(fault: OSError) -> None:
        out.problems[str(fault.filename)] = f"could not be listed: {fault.strerror or fault}"

    for at, folders, names in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        files += [f"{at}/{name}" for name in sorted(names) if name[0] not in "._"]
    kept = []
    for path in files:
        if format_by_name(path) and not os.path.isfile(path):
            out.problems[path] = "expected a file, got a dangling link, a pipe or a device"
        else:
            kept.append(path)
    data = usable(kept, out.ignored)
    if not data:
        out.problems.setdefault(folder, f"expected data files, got none; {known_formats()}")
        return
    out.groups += divide(folder, os.path.basename(folder) or "data", data)


def _remote(uri: str) -> DataGroup:
    """Return the source of a URI, whose files are listed when it is indexed."""
    path = uri.partition("?")[0].rstrip("/")
    name = path.rpartition("/")[2]
    if any(mark in name for mark in "*["):
        name = path.rpartition("/")[0].rpartition("/")[2]
    return DataGroup(
        name=clean_name(scrub(name).split(".")[0]), format="", folder=path, files=(uri,)
    )
