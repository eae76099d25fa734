"""Access to files of disks, mounts and HDFS (pyarrow.fs), and object stores (``object_store.py``).

Local files are read with plain reads into small buffers. A memory map of a 400 MB column counts as
400 MB of resident memory, and truncating a mapped file kills the process.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlord.errors import SourceError
from overlord.sources.base import PAIR, BadFile, File, StorageUnreachable, short_read
from overlord.sources.object_store import ListedObject, RemoteStore
from overlord.sources.range_file import READ_AHEAD, RangeFile
from overlord.sources.retry import StorageStats, check_same_file, check_same_status, retry_briefly
from overlord.uris import KNOWN, OBJECT_STORES, SCHEME, masked_uri, scrub, uri_problems

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.fs as pafs

SPECIAL, DANGLING = "a pipe, socket or device", "a dangling link"
BLOCK = 2**18  # bytes of one read; measured: 64 kB to 1 MB make no difference on a local disk


@dataclass(frozen=True, slots=True)
class Files:
    """Access to one file system, or to a Python object in place of files.

    An instance can be pickled, and all threads share it.
    """

    fs: pafs.FileSystem | RemoteStore | None = None
    local: bool = True
    held: Any = None  # a map-style dataset or a Factory
    # The row that each thread requests from ``held``; a reader sets the mapping, and reports it.
    requested: dict[int, int] | None = field(default=None, compare=False)

    @staticmethod
    def resolve(
        path: Any, *, source: str = "", suffixes: Sequence[str] = ()
    ) -> tuple[Files, tuple[File, ...]]:
        """Return the access to a source's files, and the files sorted by path.

        ``path`` is a file, directory, glob or URI, or a list of these. ``suffixes`` select the data
        files inside a directory. Globs support ``*``, ``?``, ``[...]`` and ``**``; in a URI ``?``
        starts the store's options instead. Raises SourceError.
        """
        names = [os.fspath(p) for p in ([path] if isinstance(path, (str, Path)) else path)]
        if not names:
            raise SourceError(
                source,
                "expected at least one file, got an empty list",
                remedy="list the paths of the source's files",
            )
        files: list[File] = []
        accesses: list[Files] = []
        for name in names:
            access, rest = _access_to(name, source)
            accesses.append(access)
            files += access.expand(rest, name, source, tuple(suffixes))
        if any(access.fs != accesses[0].fs for access in accesses):
            raise SourceError(
                source,
                "expected all files on one filesystem, got several",
                remedy="make one source for each filesystem",
            )
        files.sort(key=lambda f: f.path)
        _refuse_duplicates(files, source, accesses[0].local)
        return accesses[0], tuple(files)

    @property
    def read_ahead(self) -> int:
        """Bytes that an open file holds for read-ahead, as estimated; 0 for local files."""
        return 0 if self.fs is None or self.local else READ_AHEAD

    @property
    def remote(self) -> bool:
        """Whether the files are in an object store.

        Reads of an object store request the indexed version, and are retried by ``RemoteStore``.
        """
        return isinstance(self.fs, RemoteStore)

    def with_stats(self, stats: StorageStats) -> Files:
        """Return a copy for a running job, whose store requests are counted in ``stats``.

        Access to anything but an object store is returned unchanged.
        """
        return (
            replace(self, fs=replace(self.fs, stats=stats, mid_run=True))
            if isinstance(self.fs, RemoteStore)
            else self
        )

    def with_requested(self) -> Files:
        """Return a copy that records the requested rows of a Python object, by thread."""
        return self if self.held is None else replace(self, requested={})

    def set_requested(self, row: int) -> None:
        """Record that this thread requests a row of a Python object."""
        if self.requested is not None:
            self.requested[threading.get_ident()] = row

    def open(self, file: File, ranges: Sequence[tuple[int, int]] = ()) -> pa.NativeFile:
        """Open a file for random access; files that are not local are read ahead.

        ``ranges`` (start, stop) are the bytes that the caller will read: read-ahead stops at their
        ends. Reads release the interpreter lock.
        """
        assert self.fs is not None
        if isinstance(self.fs, RemoteStore):
            return self.fs.open(file, ranges)
        handle = self.fs.open_input_file(file.path)
        return handle if self.local else _full_reads(handle, file, ranges)

    def check_unchanged(self, file: File) -> os.stat_result | None:
        """Raise OSError if the file is not the indexed one, whose offsets locate the rows.

        Return the status of a local file, otherwise None.
        """
        # Every read of a store requests the indexed version.
        if self.fs is None or isinstance(self.fs, RemoteStore):
            return None
        if file.companion is not None:
            try:
                self.check_unchanged(file.companion)
            except StorageUnreachable as error:
                problem = f"{file.companion.path}: {error.problem}"
                raise StorageUnreachable(problem, error.remedy, error.kind) from error
        if self.local:
            return check_same_file(file)
        info = self.fs.get_file_info(file.path)
        if not info.is_file:
            raise StorageUnreachable(
                "the file disappeared after the source was indexed",
                "restore it, or start a new run without it",
                "gone",
            )
        check_same_status(file, info.size, info.mtime_ns or 0)  # 0: the same as in the index
        return None

    def check_readable(self, file: File, start: int = 0, stop: int | None = None) -> None:
        """Read the bytes from ``start`` up to ``stop`` (None: the end), and drop them.

        Raises OSError if storage is at fault. After a failure of a decoder, this distinguishes a
        corrupt file (quarantine) from a failing disk (an error).
        """
        self.check_unchanged(file)
        if self.fs is None:
            return
        with self.open(file) as handle:
            handle.seek(start)
            left = (file.size if stop is None else min(stop, file.size)) - start
            while left > 0 and (block := handle.read_buffer(min(left, 2**22))).size:
                left -= block.size
        if left > 0:
            raise short_read(left)

    def lookup(self, paths: Sequence[str]) -> dict[str, File]:
        """Return the existing files among ``paths``; several of one folder cost one listing."""
        folders: dict[str, list[str]] = {}
        for path in paths:
            folders.setdefault(path.rpartition("/")[0], []).append(path)
        found = dict[str, File]()
        for folder, wanted in folders.items():
            entries = (
                [self._find(wanted[0])]
                if len(wanted) == 1
                else self._list(folder or "/", recursive=False)
            )
            found |= {e.path: e.file for e in entries if e is not None and e.file is not None}
        return {path: found[path] for path in paths if path in found}

    def expand(self, rest: str, name: str, source: str, suffixes: tuple[str, ...]) -> list[File]:
        """Return the files of a path, directory or glob ``rest``.

        ``name`` is the text that the user wrote, for errors. Raises SourceError.
        """
        assert self.fs is not None
        is_uri = bool(SCHEME.match(name))
        try:
            # Listing a pattern at once saves one request per source.
            if isinstance(self.fs, RemoteStore) and _is_glob(rest, is_uri):
                return self._glob(rest, name, source, is_uri)
            entry = self._find(rest)
            if entry is None and not _is_glob(rest, is_uri):
                raise SourceError(
                    source, "no such file or directory", name, self._suggestion(rest, name, is_uri)
                )
            if entry is None:
                return self._glob(rest, name, source, is_uri)
            return [entry.file] if entry.file else self._directory(rest, name, source, suffixes)
        except (BadFile, StorageUnreachable) as error:
            raise SourceError(source, error.problem, name, error.remedy) from error
        except UnicodeDecodeError as error:  # pyarrow lists a whole directory or nothing
            problem = f"expected file names in UTF-8, got {error.object!r}"
            raise SourceError(
                source, problem, name, "rename the file, or move it elsewhere"
            ) from error
        except (OSError, re.error) as error:
            raise SourceError(
                source,
                f"could not be listed: {scrub(str(error))}",
                name,
                "check the pattern, the permissions and the mount",
            ) from error

    def _directory(
        self, path: str, name: str, source: str, suffixes: tuple[str, ...]
    ) -> list[File]:
        depth = len(path.rstrip("/")) + 1
        # A plain .json next to data (dataset_info.json) describes it; name such files by a glob to
        # read them as lines.
        suffixes = tuple(s for s in suffixes if s != ".json")
        entries = [
            e
            for e in self._list(path, recursive=True)
            if e.path.endswith(suffixes or "")
            and not any(p[0] in "._" for p in e.path[depth:].split("/") if p)
        ]
        _refuse_special_files(entries, source)
        files = _without_single_halves([e.file for e in entries if e.file])
        if not files:
            wanted = f" with the suffix {', '.join(suffixes)}" if suffixes else ""
            raise SourceError(
                source,
                f"expected a file{wanted} in the directory, got none",
                name,
                "add one or name another directory; names that start with '_' or '.' are ignored",
            )
        return files

    def _glob(self, pattern: str, name: str, source: str, is_uri: bool) -> list[File]:
        parts = pattern.split("/")
        first = next(k for k, part in enumerate(parts) if _is_glob(part, is_uri))
        base = "/".join(parts[:first]) or "/"
        matches = re.compile(_glob_regex("/".join(parts[first:]), is_uri)).fullmatch
        entries, depth = (
            self._list(base, recursive=first < len(parts) - 1),
            len(base.rstrip("/")) + 1,
        )
        _refuse_special_files([e for e in entries if matches(e.path[depth:])], source)
        files = [e.file for e in entries if e.file]
        matching = [f for f in files if f.path == pattern] or [
            f for f in files if matches(f.path[depth:])
        ]
        if not matching:
            names = sorted(f.path[depth:] for f in files)
            holds = (
                f"{base} holds {len(names)} files, for example {names[0]}"
                if names
                else f"{base} is empty or does not exist"
            )
            raise SourceError(
                source, "expected a pattern that matches files, got no match", name, holds
            )
        return matching

    def _suggestion(self, path: str, name: str, is_uri: bool) -> str:
        """Return a hint for a missing file: the closest name in its folder, or any name there.

        Usually the name is misspelled, or the folder is wrong.
        """
        folder, _, missing = path.rstrip("/").rpartition("/")
        names = sorted(
            e.path.rpartition("/")[2] for e in self._list(folder or "/", recursive=False)
        )
        if not names:
            holds = f"{folder} is empty or does not exist"
        elif close := difflib.get_close_matches(missing, names, n=1):
            holds = f"did you mean {close[0]}?"
        else:
            holds = f"{folder} holds {len(names)} entries, for example {names[0]}"
        start = (
            ""
            if is_uri or os.path.isabs(os.path.expanduser(name))
            else "; a relative path starts at the working directory"
        )
        return holds + start

    def _find(self, path: str) -> ListedObject | None:
        assert self.fs is not None
        if isinstance(self.fs, RemoteStore):
            return self.fs.find(path)
        fs = self.fs
        info = retry_briefly(lambda: fs.get_file_info(path))
        if info.type.name == "Unknown":
            raise BadFile(
                f"expected a file or a directory, got {SPECIAL}", "copy the data into a file"
            )
        if info.type.name == "NotFound" and self.local and os.path.islink(path):
            raise BadFile(
                f"expected a file or a directory, got {DANGLING}", "restore the target of the link"
            )
        return None if info.type.name == "NotFound" else _entry(info)

    def _list(self, base: str, recursive: bool) -> list[ListedObject]:
        import pyarrow.fs as pafs

        assert self.fs is not None
        if isinstance(self.fs, RemoteStore):
            return self.fs.list(base, recursive)
        fs = self.fs

        def listed(path: str, deep: bool) -> list[ListedObject]:
            selector = pafs.FileSelector(path, allow_not_found=True, recursive=deep)
            return [_entry(info) for info in retry_briefly(lambda: fs.get_file_info(selector))]

        return (
            _walk(base, recursive, lambda path: listed(path, False))
            if self.local
            else listed(base, recursive)
        )


def _without_single_halves(files: list[File]) -> list[File]:
    """Return the data files of a directory without ``.bin`` and ``.idx`` files of other tools.

    They are such files if other data are next to them, and none of them has its other half.
    """
    halves = {file.path for file in files if file.path.endswith(PAIR)}
    stems = [{path[:-4] for path in halves if path.endswith(end)} for end in PAIR]
    if len(halves) == len(files) or stems[0] & stems[1]:
        return files
    return [file for file in files if file.path not in halves]


def _full_reads(
    handle: pa.NativeFile, file: File, ranges: Sequence[tuple[int, int]]
) -> pa.NativeFile:
    """Return a handle whose reads are complete, for client libraries (HDFS) with short reads.

    A decoder would mistake a short read for the end of the file. Local files need no such handle:
    the kernel returns fewer bytes only at the end.
    """
    import pyarrow as pa

    def fetch(start: int, stop: int) -> memoryview:
        handle.seek(start)
        data = handle.read(stop - start)
        if len(data) < stop - start:
            raise short_read(stop - start - len(data))
        return memoryview(data)

    return pa.PythonFile(RangeFile(fetch, file.size, ranges, handle.close), mode="r")


def _access_to(name: str, source: str) -> tuple[Files, str]:
    if problems := uri_problems(name):
        raise SourceError(source, problems[0])
    if not SCHEME.match(name):
        return _local(), os.path.abspath(os.path.expanduser(name))
    scheme = name.split("://", 1)[0].lower()
    if scheme in OBJECT_STORES:
        remote, path = RemoteStore.of(name)
        return Files(remote, False), path
    known = f"known schemes: {', '.join(KNOWN)}"
    if scheme not in KNOWN:
        raise SourceError(
            source, f"expected a known URI scheme, got {scheme!r}", masked_uri(name), known
        )
    try:
        return _filesystem(name)
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        raise SourceError(
            source, f"could not be opened as a URI: {scrub(str(error))}", name, known
        ) from error


@lru_cache(maxsize=1)
def _local() -> Files:
    import pyarrow.fs as pafs

    return Files(pafs.LocalFileSystem(), True)


def _filesystem(uri: str) -> tuple[Files, str]:
    """Return the file system of a URI and the path in it, wildcards included.

    pyarrow parses only the part before the wildcards, since the rest is not a valid URI.
    """
    import pyarrow.fs as pafs

    body, mark, query = uri.partition("?")
    scheme, rest = body.split("://", 1)
    parts = rest.split("/")
    first = next((k for k, part in enumerate(parts) if _is_glob(part, True)), len(parts))
    fs, base = pafs.FileSystem.from_uri(f"{scheme}://{'/'.join(parts[:first])}{mark}{query}")
    path = "/".join([base.rstrip("/"), *parts[first:]])
    return Files(fs, isinstance(fs, pafs.LocalFileSystem)), path


def _entry(info: Any) -> ListedObject:
    file = File(info.path, info.size, info.mtime_ns or 0) if info.is_file else None
    return ListedObject(info.path, file, SPECIAL if info.type.name == "Unknown" else "")


def _walk(
    base: str, recursive: bool, listed: Callable[[str], list[ListedObject]]
) -> list[ListedObject]:
    """Return the entries below ``base``, dangling links included. Raises BadFile for a link cycle.

    pyarrow's recursive listing follows every turn of a cycle and does not report dangling links.
    """
    result, directories = list[ListedObject](), [(base, frozenset[tuple[int, int]]())]
    while directories:
        path, above = directories.pop()
        if not os.path.isdir(path):
            continue
        stat = os.stat(path)
        if (here := (stat.st_dev, stat.st_ino)) in above:
            if any(part[0] in "._" for part in path[len(base) :].split("/") if part):
                continue  # a cycle below a hidden directory, whose files are ignored
            raise BadFile(
                f"expected no link cycle, got {path}, a link to a directory that contains it",
                "remove the link: its files would be read twice",
            )
        entries = listed(path)
        known = {e.path.rpartition("/")[2] for e in entries}
        dangling = [f"{path.rstrip('/')}/{name}" for name in os.listdir(path) if name not in known]
        result += entries + [
            ListedObject(p, None, DANGLING)
            for p in dangling
            if os.path.islink(p) and not os.path.exists(p)
        ]
        if recursive:
            directories += [
                (e.path, above | {here}) for e in entries if e.file is None and not e.special
            ]
    return result


def _refuse_special_files(entries: Sequence[ListedObject], source: str) -> None:
    """Raise SourceError if an entry is a pipe, socket, device or dangling link."""
    special = sorted((e.path, e.special) for e in entries if e.special)
    if special:
        more = f"; and {len(special) - 1} more like it" if len(special) > 1 else ""
        raise SourceError(
            source,
            f"expected a file, got {special[0][1]}{more}",
            special[0][0],
            "replace it by a file, or exclude it from the listing",
        )


def _is_glob(path: str, is_uri: bool) -> bool:
    return any(c in path for c in ("*[" if is_uri else "*?["))


def _glob_regex(pattern: str, is_uri: bool) -> str:
    """Return the pattern as a regular expression, with the rules of a shell.

    ``*`` stays inside a name and skips hidden names. ``**/`` matches any number of directories that
    are not hidden.
    """
    out, i = "", 0
    while i < len(pattern):
        c, at_start = pattern[i], i == 0 or pattern[i - 1] == "/"
        closing = pattern.find("]", i + 2) if c == "[" else -1
        if at_start and pattern.startswith("**/", i):
            out, i = out + r"(?:[^./][^/]*/)*", i + 3
        elif c == "*":
            out, i = out + (r"(?![.])" if at_start else "") + "[^/]*", i + 1
        elif c == "?" and not is_uri:
            out, i = out + (r"(?![.])" if at_start else "") + "[^/]", i + 1
        elif closing > 0:
            body = pattern[i + 1 : closing].replace("\\", r"\\")
            out, i = out + "[" + ("^" + body[1:] if body[0] in "!^" else body) + "]", closing + 1
        else:
            out, i = out + re.escape(c), i + 1
    return out


def _refuse_duplicates(files: Sequence[File], source: str, local: bool) -> None:
    """Raise SourceError for a file that is listed twice or under two names.

    Links to a file share its size and time, so inodes are compared only for files that share both.
    """
    twice = sorted({a.path for a, b in pairwise(files) if a.path == b.path})
    if not twice and local:
        alike: dict[tuple[int, int], list[str]] = {}
        for file in files:
            alike.setdefault((file.size, file.mtime_ns), []).append(file.path)
        twice = [
            f"{a} and {b}"
            for paths in alike.values()
            if len(paths) > 1
            for a, b in _same_inode(paths)
        ]
    if twice:
        shown = "; ".join(twice[:3]) + (f" and {len(twice) - 3} more" if len(twice) > 3 else "")
        raise SourceError(
            source,
            f"expected every file once, got duplicates: {shown}",
            remedy="list each file once: its rows would be read twice",
        )


def _same_inode(paths: Iterable[str]) -> list[tuple[str, str]]:
    first_names: dict[tuple[int, int], str] = {}
    pairs = []
    for path in sorted(paths, key=lambda p: (len(p), p)):  # the shortest name first
        stat = os.stat(path)
        first = first_names.setdefault((stat.st_dev, stat.st_ino), path)
        if first != path:
            pairs.append((first, path))
    return pairs
