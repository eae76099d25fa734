"""Tables, texts and datasets of other libraries whose files fail under a running job. What happens
to files is that of ``test_storage_faults.py``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.errors import StorageError
from tests.corpus import JSON_TEXTS, TOKEN_FORMATS, write_rows
from tests.internals import LOCAL_FILES
from tests.mounts import fail, mounted
from tests.processes import WORKER_RUNTIME
from tests.scenarios.test_storage_faults import FAULTS, mended_later, trouble_there_was
from tests.store_jobs import BIG, delivered
from tests.worlds import parse

pytestmark = pytest.mark.timeout(200)
FORMATS = (*JSON_TEXTS, *TOKEN_FORMATS, "mds", "mds.zstd")
ON_WORKERS = ("csv", "text", "megatron", "mds")


def job(where: Path, format: str) -> ov.Job:
    kind, transforms = None, [ov.Tokens("tokens")]
    if format in JSON_TEXTS:
        kind, transforms = format.partition(".")[0], [ov.Map(parse, rows=True), *transforms]
    web = ov.Source("web", str(where), format=kind, transforms=transforms, epochs=1, shuffle=False)
    batch = ov.Batch(samples=20, context=512)
    return ov.Job(name="faults", sources=[web], batch=batch, slice_rows=8, chunk_bytes=2**14)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("corpora")
    for format in FORMATS:
        write_rows(root / format, format, BIG[:240], files=3)
    return {format: root / format for format in FORMATS}


@pytest.fixture(scope="module")
def undisturbed(corpora: dict[str, Path]) -> dict[str, list[Any]]:
    found = {}
    for format, where in corpora.items():
        with ov.launch(job(where, format)) as session:
            found[format] = delivered(session.client(0))
            assert session.quarantine() == []
        assert len(found[format]) == 12
    return found


RUNS = [(format, fault, "local") for format in FORMATS for fault in ("removed", "truncated")]
RUNS += [(format, "truncated", WORKER_RUNTIME) for format in ON_WORKERS]


@pytest.mark.parametrize(("format", "fault", "runtime"), RUNS)
def test_files_that_fail_for_a_while_cost_time_and_nothing_else(
    corpora: dict[str, Path],
    undisturbed: dict[str, list[Any]],
    tmp_path: Path,
    format: str,
    fault: str,
    runtime: str,
) -> None:
    where = Path(shutil.copytree(corpora[format], tmp_path / "data"))
    act, kind = FAULTS[fault]
    options = {"stall_limit_s": 60, "prefetch": 1, "read_ahead": 1}
    with ov.launch(job(where, format), runtime=runtime, **options) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        with mended_later(session, act(where), kind):
            got += list(client)
        found = trouble_there_was(session)
        assert session.quarantine() == []
    assert delivered(got) == undisturbed[format]
    assert kind in found["errors"]
    assert set(found["errors"]) <= {kind, "gone", "changed"}
    assert found["given_up"] == 0


@pytest.mark.parametrize("fault", ["EIO", "short"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_mount_that_fails_for_a_while_costs_time_and_nothing_else(
    corpora: dict[str, Path],
    undisturbed: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    format: str,
    fault: str,
) -> None:
    mount = mounted(tmp_path / "switches")
    LOCAL_FILES.replace(monkeypatch, lambda: mount)
    options = {"stall_limit_s": 60, "prefetch": 1, "read_ahead": 1}
    with ov.launch(job(corpora[format], format), **options) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        fail(tmp_path / "switches", fault, 3)
        got += list(client)
        found = trouble_there_was(session)
        assert session.quarantine() == []
    assert delivered(got) == undisturbed[format]
    assert set(found["errors"]) == {{"short": "short read"}.get(fault, fault)}
    assert found["given_up"] == 0


@pytest.mark.parametrize("format", ["csv", "text", "megatron", "mds"])
def test_files_that_stay_truncated_end_the_job_and_name_one(
    corpora: dict[str, Path],
    undisturbed: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    format: str,
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.5")
    where = Path(shutil.copytree(corpora[format], tmp_path / "data"))
    options = {"stall_limit_s": 60, "prefetch": 1, "read_ahead": 1}
    with ov.launch(job(where, format), **options) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        FAULTS["truncated"][0](where)
        with pytest.raises(StorageError, match=r"the file changed since the source was") as caught:
            got.extend(client)
        assert session.quarantine() == []
    assert caught.value.path.startswith(f"{where}/part-")
    assert delivered(got) == undisturbed[format][: len(got)]
