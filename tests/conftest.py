"""Settings of the whole suite: no deadline on examples (machines are noisy), and a cache of its own
for every run.

The examples of properties are the same in every run, so that only a change makes the suite fail.
``make laws`` draws new ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import rays
from tests.laws import EXAMPLES

settings.register_profile(
    "overlord",
    deadline=None,
    max_examples=EXAMPLES,
    print_blob=True,
    derandomize="OVERLORD_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("overlord")

if importlib.util.find_spec("dateutil") is None:
    # pyarrow imports it for every column of Python values. Where it is missing, the search through
    # pytest's import hooks takes a fifth of the time of most properties.
    sys.modules["dateutil"] = None  # type: ignore[assignment]

multiprocessing.set_forkserver_preload(["tests.preload"])

# A shell ignores SIGINT in commands that end in "&", and their children would not receive Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep indexes and models of tests out of the user's caches, in workers on Ray as well."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERLORD_CACHE", str(path))
        patch.setenv("HF_HUB_CACHE", str(path / "hub"))
        yield path


@pytest.fixture(autouse=True, scope="module")
def _imported_for_good() -> None:
    """Freeze all objects that exist before the tests of a file. With torch and Ray loaded, each
    garbage collection of them takes half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a small real tokenizer: bytes, and a few merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["one two three four five six seven " * 20], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


# Ray: one small cluster of this machine for all tests that need it, since starting one takes five
# seconds. These tests run first, and the cluster ends after the last of them. An idle cluster, with
# processes that wait for an actor of their name, would take a tenth of a core.

_cluster = contextlib.ExitStack()
_running: list[object] = []


def _wants_ray(item: pytest.Item | None) -> bool:
    if item is None:
        return False
    named = getattr(item, "callspec", None)
    everywhere = os.environ.get("OVERLORD_TEST_RUNTIME") == "ray"
    return (
        everywhere
        or "ray_cluster" in getattr(item, "fixturenames", ())
        or (named is not None and "ray" in named.id.split("-"))
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _wants_ray(item))


@pytest.fixture
def ray_cluster() -> None:
    if reason := rays.missing():
        pytest.skip(reason)
    if not _running:
        _running.append(_cluster.enter_context(rays.cluster()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if _running and not _wants_ray(nextitem):
        _running.clear()
        _cluster.close()
