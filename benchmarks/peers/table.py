"""The loaders that benchmarks/throughput.py compares: their versions, processes and limits.

Everything that a page says of a loader besides figures is in this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ONE, RANK, SERVED, DRIVER = "one", "rank", "served", "driver"
SHUFFLED = "-shuffled"  # the end of the name of a loader that shuffles
RAY_ORDER = (
    "it shuffles whole datasets before the first row, or rows of a batch in the rank, after packing"
)
TORCHDATA = ("torchdata==0.11.0",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One loader."""

    module: str
    # "one": a process serves all ranks; "rank": each rank is a process that loads; "served": each
    # rank is a process that receives; "driver": a process starts the others, ranks among them.
    processes: str = RANK
    pins: tuple[str, ...] = ()  # the first one names the distribution
    requirements: bool = True  # pip also installs what the pinned distributions require
    converts: bool = False  # whether its module has a writer of the format that it reads
    swept: bool = True  # the number of workers is chosen by a sweep
    least_workers: int = 0
    # By job or order ("null", "tokenized", "shuffled", "in order"): why there is no such cell.
    unable: dict[str, str] = field(default_factory=dict)
    note: str = ""  # the difference to the job of the bare loop

    @property
    def distribution(self) -> str:
        return self.pins[0].partition("==")[0] if self.pins else ""


OVERLORD = {
    "overlord": Peer(module="overlord_side", processes=ONE, swept=False),
    "overlord-shuffled": Peer(module="overlord_side", processes=ONE, swept=False),
    "overlord-one": Peer(module="overlord_side", processes=ONE, swept=False),
    "overlord-process": Peer(module="peers.connected", processes=SERVED, swept=False),
    "overlord-process-shuffled": Peer(module="peers.connected", processes=SERVED, swept=False),
}
PEERS = {
    "bare": Peer(module="peers.bare", processes=ONE, swept=False),
    **OVERLORD,
    "nodes": Peer(module="peers.nodes", pins=TORCHDATA),
    "stateful": Peer(module="peers.torch_loader", pins=TORCHDATA),
    "torch": Peer(module="peers.torch_loader"),
    "torch-numpy": Peer(module="peers.torch_loader"),
    "grain": Peer(
        module="peers.grain_records",
        converts=True,
        pins=("grain==0.2.18", "array-record==0.8.6"),
        note="the mixture is a fixed pattern instead of random draws",
    ),
    "streaming": Peer(
        module="peers.streaming_mds",
        converts=True,
        # Its other requirements are clients of object stores, transformers and torchvision, whose
        # published builds do not load with a CPU build of torch. None is used here.
        pins=(
            "streaming-community==0.14.2",
            "Brotli==1.2.1",
            "python-snappy==0.7.3",
            "cramjam==2.14.0",
            "xxhash==4.1.0",
            "zstd==1.5.6.1",
            "catalogue==2.0.10",
            "tqdm==4.70.1",
        ),
        requirements=False,
        note="in order, batches hold rows of every stream, and those of a stream follow each other",
    ),
    "energon": Peer(
        module="peers.energon_tars",
        converts=True,
        pins=("megatron-energon==7.4.1",),
        note="packs buffers of 1024 samples; the last microbatch of a buffer is not full",
    ),
    "datasets": Peer(module="peers.hf_datasets", converts=True, pins=("datasets==5.2.0",)),
    "megatron": Peer(
        module="peers.megatron_gpt",
        converts=True,
        pins=("megatron-core==0.16.1",),
        unable={
            "tokenized": "it reads token ids only: text is tokenized before the training",
            "in order": "it shuffles documents and samples, which no option turns off",
        },
        note="weights count sequences instead of documents; documents end with an extra token and "
        "are cut where a sequence is full instead of truncated",
    ),
    "ray-data": Peer(
        module="peers.ray_cell",
        processes=DRIVER,
        pins=("ray==2.60.0",),
        least_workers=1,
        unable={"shuffled": RAY_ORDER},
        note="mixes files instead of rows; workers are those of all ranks; the cluster is there "
        "before the clock starts",
    ),
    "ray-data-list": Peer(
        module="peers.ray_cell",
        processes=DRIVER,
        pins=("ray==2.60.0",),
        least_workers=1,
        unable={"shuffled": RAY_ORDER},
        note="files are drawn by weight in advance: not a mixture that can change; otherwise as "
        "ray-data",
    ),
}
LABELS = tuple(
    name + end
    for name in PEERS
    for end in ("", SHUFFLED)
    if not end or (name != "bare" and name not in OVERLORD)
)


def peer_of(name: str) -> tuple[str, bool]:
    """Return the loader of a name, and whether it shuffles."""
    if name in PEERS:
        return name, name.endswith(SHUFFLED)
    return name.removesuffix(SHUFFLED), True


def reason_against(name: str, job: str) -> str | None:
    """Return why a loader cannot do a job, or None."""
    peer, shuffled = peer_of(name)
    unable = PEERS[peer].unable
    return unable.get(job) or unable.get("shuffled" if shuffled else "in order")
