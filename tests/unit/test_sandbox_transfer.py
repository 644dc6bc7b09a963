"""Trees out of boxes: whatever stands in a tar, nothing outside of its directory is written, and no link leads out."""

import io
import os
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, strategies as st

from rollstream.sandboxes.protocol import DownloadTooLarge
from rollstream.sandboxes.transfer import leads_out, pack, unpack

NAMES = st.sampled_from(["a", "b", "c", "..", ".", "a/b", "b/c/..", "../..", "/etc", "/tmp/x", "a/../../b", "", "./a"])
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])


def archive(entries: list[tuple[str, bytes, str]]) -> io.BytesIO:
    """A tar of (name, type, target of a link or content of a file)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, text in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o7777
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                entry.linkname = text
            content = text.encode() if kind == tarfile.REGTYPE else b""
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    raw.seek(0)
    return raw


def everything(root: Path) -> list[Path]:
    return [Path(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files)]


@given(st.lists(st.tuples(NAMES.map(lambda name: f"top/{name}" if name else "top"), KINDS, NAMES), max_size=12))
def test_no_tar_writes_or_links_outside_of_its_directory(entries: list[tuple[str, bytes, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        (root / "beside").mkdir()
        into = root / "in" / "to"
        into.parent.mkdir()
        try:
            unpack(archive(entries), into, max_bytes=1000, max_files=100)
        except FileNotFoundError:
            assert not entries
        assert [
            path
            for path in everything(root)
            if path not in (root / "beside", into.parent) and into not in (path, *path.parents)
        ] == []
        for path in everything(into):
            assert Path(os.path.realpath(path)).is_relative_to(into), path
            assert path.is_symlink() or path.is_dir() or path.stat().st_mode & 0o7000 == 0


@given(
    st.lists(st.sampled_from(["a", "b", "..", "."]), max_size=6), st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4)
)
def test_a_link_is_kept_only_if_dots_alone_can_say_where_it_leads(target: list[str], link: list[str]) -> None:
    text = "/".join(target)
    kept = not leads_out(PurePosixPath(*link), text)
    parts = PurePosixPath(text).parts
    ups = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    assert kept == (bool(text) and ".." not in parts[ups:] and ups < len(link))


@pytest.mark.parametrize("target", ["/etc/passwd", "../../x", "a/../../../x", "", "a/.."])
def test_links_that_lead_out_or_may_are_told(target: str) -> None:
    assert leads_out(PurePosixPath("folder/link"), target)


@pytest.mark.parametrize("target", ["x", "../x", "./x", ".", "sub/y"])
def test_links_within_the_tree_are_kept(target: str) -> None:
    assert not leads_out(PurePosixPath("folder/link"), target)


def test_a_file_behind_a_link_is_written_beside_it_and_never_through_it(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    raw = archive([("t/out", tarfile.SYMTYPE, str(tmp_path / "victim")), ("t/out/file", tarfile.REGTYPE, "x")])
    got = unpack(raw, tmp_path / "t", max_bytes=10, max_files=10)
    assert list((tmp_path / "victim").iterdir()) == []
    assert (tmp_path / "t" / "out" / "file").read_text() == "x"
    assert got.left_out == ("out",)


def test_sizes_and_counts_are_bounded_and_second_names_count(tmp_path: Path) -> None:
    with pytest.raises(DownloadTooLarge):
        unpack(archive([("t/f", tarfile.REGTYPE, "x" * 11)]), tmp_path / "a", max_bytes=10, max_files=10)
    with pytest.raises(DownloadTooLarge):
        unpack(archive([(f"t/{n}", tarfile.DIRTYPE, "") for n in range(4)]), tmp_path / "b", max_bytes=10, max_files=3)
    links = [("t/f", tarfile.REGTYPE, "x" * 6), ("t/g", tarfile.LNKTYPE, "t/f")]
    with pytest.raises(DownloadTooLarge):
        unpack(archive(links), tmp_path / "c", max_bytes=10, max_files=10)


def test_an_empty_tar_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unpack(archive([]), tmp_path / "t", max_bytes=10, max_files=10)


@given(st.dictionaries(st.sampled_from(["a", "b", "c/d", "c/e", "f/g/h"]), st.binary(max_size=50), min_size=1))
def test_what_is_packed_comes_out_the_same(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        for name, content in files.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(content)
        raw = io.BytesIO()
        pack(source, "copy", raw)
        raw.seek(0)
        got = unpack(raw, Path(folder, "back"), max_bytes=10_000, max_files=100)
        assert {name: Path(folder, "back", name).read_bytes() for name in files} == files
        assert (got.files, got.size, got.left_out) == (len(files), sum(map(len, files.values())), ())
