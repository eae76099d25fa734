"""URIs of files in object stores: valid forms, and removal of secrets from texts.

Secrets come from the environment alone. A URI goes into job files, index caches, quarantine lists
and errors. So a URI that carries a secret is refused before it is used.
"""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKETS = ("s3", "s3a", "gs", "az")
OBJECT_STORES = (*_BUCKETS, "abfs", "abfss")
KNOWN = ("file", *OBJECT_STORES, "hdfs")
OPTIONS = ("region", "anonymous")
_WITH_USER = ("abfs", "abfss", "hdfs")  # a container, or a user name without a password
_NEARLY = re.compile(
    rf"\s*({'|'.join((*KNOWN, 'https?', 'hf', 'ftp'))}):(?!//)|\s+[A-Za-z][A-Za-z0-9+.-]*://",
    re.IGNORECASE,
)
_VALUES = {
    "region": re.compile(r"[A-Za-z0-9_-]*"),
    "anonymous": re.compile(r"|0|1|true|false|yes|no", re.IGNORECASE),
}
ENVIRONMENT = (
    "credentials and endpoints come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)"
)
HIDDEN = "***"

_SECRET = (
    r"secret|token|passw|pwd|signature|credential|api_?key|access_?key|account_?key|private_?key"
)
_SECRET_NAME = re.compile(rf"{_SECRET}|^sig$|^key$|^sas", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"(?:^|_)(?:SAS|KEY)(?:_|$)|{_SECRET}", re.IGNORECASE)
_NO_SECRETS = re.compile(r"_(?:FILE|PATH|URI|URL|DIR)$", re.IGNORECASE)
_PATTERNS = (
    (re.compile(r"(://)[^/@:\s]*:[^@\s]*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(https?://)[^/@\s]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (
        re.compile(
            rf"((?:[\w-]*(?:{_SECRET})[\w-]*|\bsig|\bkey)[\"']?\s*[=:]\s*[\"']?)[^\s&\"',;<>)}}]+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            r"(<\w*(?:Token|Secret|AccessKeyId|Signature|StringToSign|CanonicalRequest)\w*>)[^<]*",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(authorization[\"']?\s*[=:]\s*)[^\n\r]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
)


def is_uri(text: str) -> bool:
    """Return whether a text is a URI, or a malformed one: ``s3:/bucket``, or one after a space.

    ``Path`` removes a slash from a URI.
    """
    return bool(SCHEME.match(text) or _NEARLY.match(text))


def uri_problems(uri: str) -> list[str]:
    """Return the problems of a URI as texts without its secrets; a plain path has none."""
    # A malformed URI would count as a path, and its secrets would appear in every error.
    if _NEARLY.match(uri):
        return [
            "expected a path, or a URI as in s3://bucket/name, got one that lacks its "
            f"'//' or begins with a space; {ENVIRONMENT}"
        ]
    if not SCHEME.match(uri):
        return []
    scheme, rest = uri.split("://", 1)
    scheme = scheme.lower()
    body, _, query = rest.partition("?")
    user, at, host = body.partition("/")[0].rpartition("@")
    port = host.partition(":")[2]
    shown = masked_uri(uri)
    # A secret may contain '/'. Then the text before it looks like a host, but is the user and half
    # of a password. A port or a bucket never has this form.
    if (
        (at and ":" in user)
        or (port and not port.isdigit())
        or (at and scheme not in _WITH_USER)
        or (scheme in _BUCKETS and port)
    ):
        return [
            f"expected a URI without credentials, got a user or password in {shown}; {ENVIRONMENT}"
        ]
    given = parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in given]
    if secret := [name for name in names if _SECRET_NAME.search(name)]:
        return [
            f"expected a URI without secrets, got {', '.join(secret)} in {shown}; {ENVIRONMENT}"
        ]
    if scheme in OBJECT_STORES and (unknown := [name for name in names if name not in OPTIONS]):
        return [
            f"expected only the options {', '.join(OPTIONS)} in {shown}, got {unknown[0]!r}; "
            f"{ENVIRONMENT}"
        ]
    if scheme in OBJECT_STORES and (
        wrong := [name for name, value in given if not _VALUES[name].fullmatch(value)]
    ):
        return [
            f"{shown}: expected {wrong[0]} as in ?region=eu-west-1 or ?anonymous=true, "
            f"got other characters; {ENVIRONMENT}"
        ]
    return []


def masked_uri(uri: str) -> str:
    """Return a URI for errors and logs, without users, values of options and known secrets.

    The container or user name of abfs and hdfs stays. Secrets may be anywhere in a refused URI.
    """
    head, mark, query = uri.partition("?")
    head = (
        re.sub(r"(://)[^/@\s]*@", rf"\1{HIDDEN}@", scrub(head))
        if head.partition("://")[0].lower() not in _WITH_USER
        else scrub(head)
    )
    return (
        scrub(head + mark + re.sub(r"=[^&]*", f"={HIDDEN}", query))
        if SCHEME.match(uri)
        else scrub(uri)
    )


def options_of(query: str) -> tuple[str, bool]:
    """Return the options of a URI's query: region ("" if not given), and whether it is anonymous.

    Anonymous requests are not signed.
    """
    given = dict(parse_qsl(query, keep_blank_values=True))
    return given.get("region", ""), given.get("anonymous", "false").lower() in (
        "",
        "1",
        "true",
        "yes",
    )


def scrub(text: str) -> str:
    """Return the text with ``***`` for passwords, signatures, tokens and the environment's secrets.

    Values of variables with names such as ``*_TOKEN`` count as secrets from 8 characters on.
    """
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_VARIABLE.search(name) and not _NO_SECRETS.search(name):
            text = text.replace(value, HIDDEN)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text
