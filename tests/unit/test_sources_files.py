import os
from pathlib import Path

import pytest

from overlord.errors import SourceError
from overlord.sources.files import Files

SUFFIXES = (".jsonl", ".parquet", ".json")


def names(path, root):
    return [
        os.path.relpath(f.path, root)
        for f in Files.resolve(path, source="web", suffixes=SUFFIXES)[1]
    ]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b.jsonl",
        "a.jsonl",
        "c.parquet",
        ".hidden.jsonl",
        "_meta.jsonl",
        "notes.txt",
        "info.json",
        "sub/d.jsonl",
        "_tmp/e.jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_a_glob_lists_sorted_and_leaves_hidden_names_out(tree):
    assert names(f"{tree}/*.jsonl", tree) == ["_meta.jsonl", "a.jsonl", "b.jsonl"]
    assert names(f"{tree}/[ab].jsonl", tree) == ["a.jsonl", "b.jsonl"]
    assert names(f"{tree}/[!a].jsonl", tree) == ["b.jsonl"]
    assert names(f"{tree}/?.jsonl", tree) == ["a.jsonl", "b.jsonl"]
    assert names(f"{tree}/**/?.jsonl", tree) == [
        "_tmp/e.jsonl",
        "a.jsonl",
        "b.jsonl",
        "sub/d.jsonl",
    ]
    assert names(f"{tree}/*/d.jsonl", tree) == ["sub/d.jsonl"]


def test_a_directory_is_searched_for_data_and_ignores_hidden_underscored_and_foreign_names(tree):
    assert names(tree, tree) == ["a.jsonl", "b.jsonl", "c.parquet", "sub/d.jsonl"]


def test_a_list_and_a_uri_name_the_same_files_as_a_glob(tree):
    assert names([f"{tree}/b.jsonl", f"{tree}/a.jsonl"], tree) == ["a.jsonl", "b.jsonl"]
    assert names(f"file://{tree}/[ab].jsonl", tree) == ["a.jsonl", "b.jsonl"]
    assert names(f"file://{tree}/sub", tree) == ["sub/d.jsonl"]


def test_sizes_and_times_come_with_the_listing(tree):
    (file,) = Files.resolve(f"{tree}/a.jsonl")[1]
    assert (file.size, file.mtime_ns) == (7, os.stat(file.path).st_mtime_ns)


def test_a_name_that_holds_wildcards_is_found_as_it_is(tmp_path):
    (tmp_path / "a[1].jsonl").write_text("x")
    assert names(f"{tmp_path}/a[1].jsonl", tmp_path) == ["a[1].jsonl"]


@pytest.mark.parametrize(
    "twice", [["a.jsonl", "*.jsonl"], ["a.jsonl", "./a.jsonl"], ["a.jsonl", "link.jsonl"]]
)
def test_the_same_file_twice_is_refused_by_name(tree, twice):
    os.symlink(tree / "a.jsonl", tree / "link.jsonl")
    with pytest.raises(SourceError, match=r"twice.*a\.jsonl"):
        Files.resolve([f"{tree}/{name}" for name in twice], source="web")


def test_a_directory_that_contains_itself_is_refused(tree):
    os.symlink(tree, tree / "sub" / "loop")
    with pytest.raises(
        SourceError, match=r"loop, a link to a directory that contains it; .* twice"
    ):
        names(tree, tree)


def test_links_that_lead_back_are_followed_once_and_hidden_ones_not_at_all(tree):
    """Of two that lead back a walk would have two to the power of forty turns to take."""
    before = names(tree, tree)
    (tree / ".hidden").mkdir()
    for name in "ab":
        os.symlink(tree, tree / ".hidden" / name)
    assert names(tree, tree) == before


@pytest.mark.parametrize("what", ["", "/*.jsonl", "/z.jsonl"])
@pytest.mark.parametrize(
    ("make", "found"),
    [(lambda p: p.symlink_to("nowhere"), "a dangling link"), (os.mkfifo, "a pipe")],
)
def test_what_is_meant_to_be_data_and_cannot_be_read_is_not_passed_over(tree, what, make, found):
    make(tree / "z.jsonl")
    with pytest.raises(SourceError, match=rf"z\.jsonl: expected a file.*, got {found}"):
        names(f"{tree}{what}", tree)


def test_what_is_not_meant_to_be_data_may_be_anything(tree):
    before = names(tree, tree)
    (tree / "latest").symlink_to("nowhere")
    os.mkfifo(tree / "_pipe.jsonl")
    assert names(tree, tree) == before


def test_two_files_of_equal_size_and_time_are_two_files(tree):
    os.utime(tree / "a.jsonl", ns=(5, 5))
    os.utime(tree / "b.jsonl", ns=(5, 5))
    assert names(f"{tree}/[ab].jsonl", tree) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("*.csv", r"got no match; .* holds 7 files, for example"),
        ("nowhere/*.csv", "is empty or does not exist"),
        ("gone.jsonl", "no such file"),
        ("empty", r"expected a file with the suffix \.jsonl.* in the directory, got none"),
        ("[z-a].jsonl", "could not be listed"),
    ],
)
def test_what_names_no_file_is_an_error_with_a_hint(tree, path, says):
    (tree / "empty").mkdir()
    with pytest.raises(SourceError, match=says) as caught:
        names(f"{tree}/{path}", tree)
    assert caught.value.source == "web"
    assert caught.value.path == f"{tree}/{path}"


def test_an_unknown_store_is_an_error_that_lists_the_known_ones():
    with pytest.raises(SourceError, match="known schemes: file, s3"):
        Files.resolve("ftp://host/x.parquet", source="web")


def test_a_name_that_is_no_text_is_told_with_its_source(tree):
    Path(os.fsdecode(os.fsencode(tree) + b"/\xff.txt")).write_text("x")
    with pytest.raises(
        SourceError,
        match=r"source 'web', .*: expected file names in UTF-8, "
        r"got .*xff\.txt.*; rename the file",
    ):
        names(f"{tree}/*.jsonl", tree)
