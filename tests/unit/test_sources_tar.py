import io
import tarfile
from pathlib import Path

import pytest

from tests.corpus import write_tar
from tests.source_reads import read_all


def put(tmp_path, members, **kw):
    path = tmp_path / "a.tar"
    write_tar(path, members, **kw)
    return str(path)


def test_members_with_one_key_are_a_sample_with_a_column_per_extension(tmp_path):
    path = put(
        tmp_path,
        [
            ("x/a.jpg", b"1"),
            ("x/a.seg.png", b"2"),
            ("x/b.jpg", b"3"),
            ("y/b.jpg", b"4"),
            ("README", b"-"),
            (".hidden.jpg", b"-"),
        ],
    )
    everything = read_all(path)
    assert everything.rows == [
        {"__key__": "x/a", "jpg": b"1", "seg.png": b"2"},
        {"__key__": "x/b", "jpg": b"3", "seg.png": None},
        {"__key__": "y/b", "jpg": b"4", "seg.png": None},
    ]
    assert read_all(path, columns=("seg.png",)).rows == [
        {"seg.png": b"2"},
        {"seg.png": None},
        {"seg.png": None},
    ]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_rows_are_named_by_offsets_as_tarfile_sees_them(tmp_path, kind):
    deep = "/".join(["folder" * 5] * 4) + "/"
    names = [f"{deep}{k:03d}.txt" for k in range(5)] + ["short.txt"]
    if kind != tarfile.USTAR_FORMAT:
        names += ["n" * 300 + ".txt", "é" * 120 + ".txt"]
    path = put(tmp_path, [(n, n.encode() * 40) for n in names], tar_format=kind)
    everything = read_all(path, slice_rows=3)
    assert [(r["__key__"] + ".txt", r["txt"]) for r in everything.rows] == [
        (n, n.encode() * 40) for n in names
    ]
    with tarfile.open(path) as tar:
        assert [row for _, row in everything.ids] == [m.offset for m in tar]


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd", "pt", "emb.PTH"])
def test_a_pickle_makes_its_sample_unreadable_by_name(tmp_path, extension):
    path = put(
        tmp_path, [("a.txt", b"1"), ("b.txt", b"2"), (f"b.{extension}", b"3"), ("c.txt", b"4")]
    )
    for columns in (None, ("txt",)):
        everything = read_all(path, columns=columns)
        assert [r["txt"] for r in everything.rows] == [b"1", b"4"]
        assert everything.reasons == [
            (1024, f"member 'b.{extension}' is a pickle, which could run code")
        ]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a character device"),
        (tarfile.FIFOTYPE, "a fifo"),
    ],
)
def test_links_and_devices_are_refused_by_name(tmp_path, kind, says):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as out:
        for name in ("a.txt", "b.txt", "c.txt"):
            info = tarfile.TarInfo(name)
            if name == "b.txt":
                info.type, info.linkname = kind, "/etc/passwd"
                out.addfile(info)
            else:
                info.size = 1
                out.addfile(info, io.BytesIO(b"x"))
    everything = read_all(str(path))
    assert [r["__key__"] for r in everything.rows] == ["a", "c"]
    assert everything.reasons == [(1024, f"member 'b.txt' is {says}")]


def test_a_name_that_leads_outside_and_one_that_is_there_twice_are_refused(tmp_path):
    everything = read_all(
        put(tmp_path, [("../a.txt", b"1"), ("b.txt", b"2"), ("b.txt", b"3"), ("c.txt", b"4")])
    )
    assert [r["__key__"] for r in everything.rows] == ["c"]
    assert [reason for _, reason in everything.reasons] == [
        "member '../a.txt' has a name outside the archive",
        "member 'b.txt' occurs twice",
    ]


def test_directories_are_passed_over(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as out:
        folder = tarfile.TarInfo("x")
        folder.type = tarfile.DIRTYPE
        out.addfile(folder)
        info = tarfile.TarInfo("x/a.txt")
        out.addfile(info, io.BytesIO(b""))
    assert read_all(str(path)).rows == [{"__key__": "x/a", "txt": b""}]


def test_a_sample_over_the_limit_is_not_read(tmp_path):
    everything = read_all(
        put(tmp_path, [("a.txt", b"1" * 700), ("a.cls", b"1" * 700), ("b.txt", b"1")]),
        max_sample_bytes=1000,
    )
    assert [r["__key__"] for r in everything.rows] == ["b"]
    assert "max_sample_bytes=1000" in everything.reasons[0][1]


def test_every_cut_keeps_whole_samples_and_names_the_place(tmp_path):
    path = put(
        tmp_path, [(f"{k}.{e}", f"{k}{e}".encode() * 100) for k in range(4) for e in ("a", "b")]
    )
    data, truth = Path(path).read_bytes(), read_all(path).rows
    end = len(data.rstrip(b"\0"))
    for cut in [*range(0, end, 97), 512, 1024, 1536, end - 1]:
        short = tmp_path / "short.tar"
        short.write_bytes(data[:cut])
        other = tmp_path / "z.tar"
        write_tar(other, [("ok.a", b"1")])
        everything = read_all([str(short), str(other)])
        kept = [{k: r[k] for k in ("__key__", "a", "b")} for r in everything.rows[:-1]]
        assert kept == truth[: len(kept)]
        assert len(everything.reasons) == 1
        assert "truncated" in everything.reasons[0][1] or cut == 0


def test_a_header_with_a_wrong_checksum_ends_the_reading_there(tmp_path):
    path = put(tmp_path, [(f"{k}.a", b"1") for k in range(4)])
    data = bytearray(Path(path).read_bytes())
    data[2048] ^= 1  # the third header
    Path(path).write_bytes(data)
    everything = read_all(path)
    assert [r["__key__"] for r in everything.rows] == ["0"]
    assert everything.reasons == [(1024, "expected the checksum 3232 in a tar header, got 3231")]


def test_a_checksum_that_is_no_number_is_reported_as_it_is(tmp_path):
    path = put(tmp_path, [("0.a", b"1")])
    data = bytearray(Path(path).read_bytes())
    data[148:156] = b"0064x0\0 "
    Path(path).write_bytes(data)
    [(_, reason)] = read_all(path).reasons
    assert reason.startswith("expected the checksum ")
    assert reason.endswith(r"in a tar header, got b'0064x0\x00 '")


def test_a_huge_extended_header_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
        info = tarfile.TarInfo("a.txt")
        info.pax_headers = {"comment": "x" * 2_000_000}
        out.addfile(info, io.BytesIO(b""))
    assert "extended tar header of" in read_all(str(path)).reasons[0][1]


def test_a_tar_without_samples_is_one_bad_row(tmp_path):
    assert read_all(put(tmp_path, [("README", b"x")])).reasons == [(0, "the file has no rows")]
