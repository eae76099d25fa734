"""Cores and memory in a container: the limits of its control group, version 1 and 2. Nothing here
stops a launch.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from overlord.process import resources
from overlord.setup import options, partition
from overlord.setup.options import Options

MB = 2**20
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
HERE = len(os.sched_getaffinity(0))


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Return a fake system: the groups of this process, and files below ``/sys/fs/cgroup``."""
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_groups_it_is_the_machine(tmp_path: Path) -> None:
    assert (resources.cores(tmp_path), resources.memory_bytes(tmp_path)) == (HERE, MACHINE)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"memory.max": f"{300 * MB}\n", "cpu.max": "100000 100000\n"}),
        (
            "0::/pod/box\n",
            {"pod/box/memory.max": f"{300 * MB}\n", "pod/box/cpu.max": "90000 100000\n"},
        ),
        (
            "0::/pod/box\n",
            {
                "pod/box/memory.max": "max\n",
                "pod/memory.max": f"{300 * MB}\n",
                "pod/cpu.max": "1 2\n",
            },
        ),
        ("0::/host/only\n", {"memory.max": f"{300 * MB}\n", "cpu.max": "100000 100000\n"}),
        (
            "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n",
            {
                "memory/box/memory.limit_in_bytes": f"{300 * MB}\n",
                "cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            },
        ),
        (
            "4:memory:/elsewhere\n3:cpu:/elsewhere\n",
            {
                "memory/memory.limit_in_bytes": f"{300 * MB}\n",
                "cpu/cpu.cfs_quota_us": "100000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
        ),
        (
            "4:memory:/\n0::/\n",
            {"memory/memory.limit_in_bytes": f"{300 * MB}\n", "unified/cpu.max": "100000 100000\n"},
        ),
    ],
    ids=[
        "v2",
        "v2 in a group",
        "v2 in a group above",
        "v2 seen from inside",
        "v1 in a group",
        "v1 seen from inside",
        "both",
    ],
)
def test_what_a_group_allows_counts(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    root = system(tmp_path, groups, files)
    assert (resources.cores(root), resources.memory_bytes(root)) == (1, 300 * MB)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"}),
        (
            "4:memory:/\n3:cpu:/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
        ),
        ("0::/\n", {"memory.max": "", "cpu.max": "0 0\n"}),
        ("0::/\n", {"memory.max": "0\n", "cpu.max": "much of it\n"}),
        ("not\nwhat::it\x00:should be\n", {}),
    ],
    ids=["v2", "v1", "empty", "nonsense", "not even groups"],
)
def test_no_bound_and_what_cannot_be_read_is_the_machine(
    tmp_path: Path, groups: str, files: dict[str, str]
) -> None:
    root = system(tmp_path, groups, files)
    assert (resources.cores(root), resources.memory_bytes(root)) == (HERE, MACHINE)


def test_a_part_of_a_core_counts_as_one_and_no_bound_gives_more_cores_than_there_are(
    tmp_path: Path,
) -> None:
    root = system(tmp_path, "0::/\n", {"cpu.max": "150000 100000\n"})
    assert resources.cores(root) == min(2, HERE)
    (root / "sys/fs/cgroup/cpu.max").write_text("9900000 100000\n")
    assert resources.cores(root) == HERE


def test_partition_rings_and_numbers_of_threads_go_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = system(tmp_path, "0::/\n", {"memory.max": f"{400 * MB}\n", "cpu.max": "100000 100000\n"})
    monkeypatch.setattr(resources, "ROOT", root)
    assert options.n_cores() == 1
    assert options.ring_bytes(Options()) == 100 * MB
    assert partition.machine_memory() == int(0.8 * 400 * MB)
