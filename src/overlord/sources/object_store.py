"""Listings and verified range reads of object stores (S3, Google Cloud Storage, Azure).

The package obstore sends the requests.

pyarrow's file systems cannot make a read depend on the version of an object. An object replaced in
mid-run would yield rows of two versions. They also retry without counting, and use more CPU per
byte. Here every read requests the indexed version, and its version, range and length are checked.
Failed requests are counted and retried until a deadline.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from overlord.checks import pip_install
from overlord.sources.base import File, StorageUnreachable
from overlord.sources.range_file import RangeFile
from overlord.sources.retry import (
    Failure,
    StorageStats,
    WrongResponse,
    classify_mid_run,
    classify_store_error,
    deadline_s,
    retry_call,
    seconds_of,
    store_give_up_error,
)
from overlord.sources.timeouts import TIMEOUTS
from overlord.uris import options_of, scrub

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
_ENDPOINT = re.compile(r"https?://[^\s/?#]+(?:[/?#]\S*)?", re.IGNORECASE)
_ENVIRONMENT = (
    "AWS_",
    "GOOGLE_",
    "AZURE_",
    "OVERLORD_STORE_",
    "HTTP_",
    "HTTPS_",
    "ALL_PROXY",
    "NO_PROXY",
    "SSL_CERT",
)


@dataclass(frozen=True, slots=True)
class ListedObject:
    """A listed object or file; if ``file`` is None, a prefix of objects or a directory."""

    path: str
    file: File | None
    special: str = ""  # description of any other entry, for example "a dangling link"


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """One bucket of an object store.

    It holds no client and no credentials, so it may be pickled, printed and stored.
    """

    root: str  # scheme://bucket
    region: str = ""
    anonymous: bool = False
    stats: StorageStats = field(default_factory=StorageStats, compare=False, repr=False)
    # True while a job runs: reads of missing or changed objects are retried, as these may be
    # restored.
    mid_run: bool = field(default=False, compare=False, repr=False)

    @staticmethod
    def of(uri: str) -> tuple[RemoteStore, str]:
        """Return the bucket of a URI, and the URI without options and final slashes.

        Names of objects are not percent-decoded.
        """
        body, _, query = uri.partition("?")
        scheme, rest = body.split("://", 1)
        bucket, _, key = rest.partition("/")
        root = f"{scheme.lower()}://{bucket}"
        return RemoteStore(root, *options_of(query)), f"{root}/{key}".rstrip("/")

    def find(self, path: str) -> ListedObject | None:
        """Return the object or the prefix with this URI, or None if neither exists."""
        if path == self.root:
            return ListedObject(path, None)
        client, key = self._client(), self._key(path)
        try:
            return ListedObject(
                path, self._file(self._retry(path, "looked up", lambda: client.head(key)))
            )
        except StorageUnreachable as error:
            if error.kind != "gone":
                raise
        return ListedObject(path, None) if self.list(path, recursive=False) else None

    def list(self, base: str, recursive: bool) -> list[ListedObject]:
        """Return all objects under a prefix, or the objects and prefixes of its next level.

        Folder markers (empty objects named like a prefix) are left out.
        """
        client, prefix = self._client(), self._key(base) or None

        def everything() -> tuple[Sequence[Any], Sequence[str]]:
            if recursive:
                return [meta for page in client.list(prefix, chunk_size=1000) for meta in page], ()
            level = client.list_with_delimiter(prefix)
            return level["objects"], level["common_prefixes"]

        metas, prefixes = self._retry(base, "listed", everything)
        folders = {prefix, *prefixes} | {
            path[:i] for m in metas for path in [m["path"]] for i, c in enumerate(path) if c == "/"
        }
        entries = [
            ListedObject(f.path, f)
            for m in metas
            if m["size"] or m["path"] not in folders
            for f in [self._file(m)]
        ]
        return entries + [ListedObject(f"{self.root}/{p}", None) for p in prefixes]

    def open(self, file: File, ranges: Sequence[tuple[int, int]] = ()) -> pa.NativeFile:
        """Open an object for random access, with read-ahead up to the ends of ``ranges``.

        ``ranges`` (start, stop) are the bytes that the caller will read, each front to back.
        """
        import pyarrow as pa

        client = self._client()
        return pa.PythonFile(
            RangeFile(lambda a, b: self._read(client, file, a, b), file.size, ranges), mode="r"
        )

    def read(self, file: File, start: int, stop: int) -> memoryview:
        """Return the bytes from ``start`` up to ``stop`` of the indexed version of the object."""
        return self._read(self._client(), file, start, stop)

    def create(self, path: str, data: bytes) -> bool:
        """Create an object; return False if an object with this name exists.

        The existing object may be from another writer, or from an earlier attempt of this call
        whose response was lost.
        """
        client, key = self._client(), self._key(path)

        def call() -> bool:
            from obstore.exceptions import AlreadyExistsError

            try:
                # A multipart upload would overwrite an existing object.
                client.put(key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        return self._retry(path, "written", call, len(data))

    def replace(self, path: str, data: bytes) -> None:
        """Write an object; an existing one is replaced."""
        client, key = self._client(), self._key(path)
        self._retry(path, "written", lambda: client.put(key, data, use_multipart=False), len(data))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing objects are not an error.

        Another process may have deleted them, or the response to an earlier attempt was lost.
        """
        client = self._client()
        for path in paths:
            try:
                self._retry(path, "removed", partial(client.delete, self._key(path)))
            except StorageUnreachable as error:
                if error.kind != "gone":
                    raise

    def _read(self, client: Any, file: File, start: int, stop: int) -> memoryview:
        options: dict[str, Any] = {"range": (start, stop)}
        if file.version and not file.version.startswith("W/"):
            options["if_match"] = f'"{file.version}"'
        key = self._key(file.path)

        def call() -> memoryview:
            response = client.get(key, options=options)
            actual = self._file(response.meta)
            if (actual.size, _version(actual)) != (file.size, _version(file)):
                raise WrongResponse(
                    "changed", f"expected {_described(file)}, got {_described(actual)}"
                )
            if tuple(response.range) != (start, stop):
                first, end = response.range
                problem = f"expected bytes {start} to {stop}, got {first} to {end}"
                raise WrongResponse("other range", problem)
            data = memoryview(response.bytes())
            if len(data) != stop - start:
                raise WrongResponse("short body", f"expected {stop - start} bytes, got {len(data)}")
            return data

        return self._retry(
            file.path, f"read (bytes {start} to {stop})", call, stop - start, self.mid_run
        )

    def _retry(
        self,
        path: str,
        operation: str,
        call: Callable[[], T],
        nbytes: int = 0,
        mid_run: bool = False,
    ) -> T:
        """Call ``call`` with retries until success, a permanent failure or the deadline.

        ``nbytes`` are counted as transferred after success. Errors contain no secret.
        """
        result = retry_call(
            call,
            classify_mid_run if mid_run else classify_store_error,
            path=path,
            operation=operation,
            stats=self.stats,
            give_up_error=store_give_up_error,
        )
        self.stats.add_bytes(nbytes)
        return result

    def _client(self) -> Any:
        given = sorted((k, v) for k, v in os.environ.items() if k.upper().startswith(_ENVIRONMENT))
        return _connect(
            self.root, self.region, self.anonymous, blake2b(repr(given).encode()).digest()
        )

    def _key(self, path: str) -> str:
        return path[len(self.root) :].strip("/")

    def _file(self, meta: Any) -> File:
        version = str(meta["e_tag"] or "")
        # Listings of Azure omit the quotes.
        version = version if version.startswith("W/") else version.strip('"')
        return File(
            f"{self.root}/{meta['path']}",
            meta["size"],
            _nanoseconds(meta["last_modified"]),
            version,
        )


@lru_cache(maxsize=64)
def _connect(root: str, region: str, anonymous: bool, environment: bytes) -> Any:
    """Return the client of a bucket, which owns its connections.

    Clients are cached in the process; a changed ``environment`` (a digest) gets a new one.
    """
    try:
        from obstore.store import from_url
    except ImportError:
        raise StorageUnreachable(
            "expected the package obstore to read object stores, got none",
            pip_install("store"),
            "not installed",
        ) from None
    _check_endpoints(root)
    config: dict[str, Any] = {"region": region} if region else {}
    config |= {"skip_signature": True} if anonymous else _profile(root)
    plain = any(
        os.environ.get(name, "").lower() in ("1", "true", "yes")
        for name in ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "ALLOW_HTTP")
    )
    options = {
        "allow_http": plain,
        "connect_timeout": f"{TIMEOUTS.store_connect_s}s",
        "read_timeout": f"{seconds_of('OVERLORD_STORE_TIMEOUT_S', TIMEOUTS.store_read_s)}s",
        "timeout": f"{deadline_s()}s",
        "user_agent": "overlord",
    }
    failure: Failure
    try:
        return from_url(root, client_options=options, retry_config={"max_retries": 0}, **config)
    except Exception as error:
        failure = classify_store_error(error)
    raise store_give_up_error(root, "opened", [failure], 0.0)


def _check_endpoints(root: str) -> None:
    """Raise StorageUnreachable if a variable of the environment holds an invalid S3 endpoint.

    obstore accepts such an endpoint and panics at the first request, which cannot be handled.
    """
    names = (
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if root.startswith("s3") else ()
    )
    for name in names:
        # The value may contain a secret, so the error does not repeat it.
        if (given := os.environ.get(name, "")) and not _ENDPOINT.fullmatch(given):
            problem = (
                f"{name}: expected http://host:port or https://host, got a value without "
                "http://, without a host, or with a space"
            )
            raise StorageUnreachable(problem, "fix the environment variable", "setup")


def _profile(root: str) -> dict[str, Any]:
    """Return the credentials provider of $AWS_PROFILE, or {} if it is unset or a key is set.

    boto3 reads the profile. Raises StorageUnreachable if it cannot.
    """
    if (
        not root.startswith("s3")
        or not os.environ.get("AWS_PROFILE")
        or os.environ.get("AWS_ACCESS_KEY_ID")
    ):
        return {}
    remedy = "pip install boto3, or set AWS_ACCESS_KEY_ID"
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return {"credential_provider": Boto3CredentialProvider()}
    except ImportError:
        problem = "AWS_PROFILE: expected the package boto3 to read profiles, got none"
    except Exception as error:
        problem, remedy = (
            f"AWS_PROFILE: {scrub(str(error))}",
            "name a profile of your AWS configuration, or set AWS_ACCESS_KEY_ID",
        )
    raise StorageUnreachable(problem, remedy, "setup")


def _version(file: File) -> str:
    """Return the entity tag, or without one the time in whole seconds.

    Listings have finer times than responses.
    """
    return file.version or str(file.mtime_ns // 10**9)


def _described(file: File) -> str:
    return f"version {_version(file)} of {file.size} bytes"


def _nanoseconds(when: datetime) -> int:
    return int(when.timestamp() * 1_000_000) * 1000
