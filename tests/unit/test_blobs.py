"""What is too long for a record: kept under its hash, checked when it is read."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rollstream.blobs import BlobReference, BlobStore, BlobUnavailable
from rollstream.errors import UsageError
from rollstream.settings import BlobSettings, Settings

CONTENT = b"a sealed world " * 1_000


@pytest.mark.parametrize("url", ["{tmp}/blobs", "file://{tmp}/blobs", "memory://blobs"])
async def test_content_is_read_back_by_its_name_wherever_it_is_kept(url: str, tmp_path: Path) -> None:
    store = BlobStore(url.format(tmp=tmp_path))
    reference = await store.put(CONTENT)
    assert await store.get(reference) == CONTENT
    assert await BlobStore(url.format(tmp=tmp_path)).get(reference) == CONTENT


async def test_the_same_content_is_kept_once_and_no_half_of_it_is_left_behind(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    assert await store.put(CONTENT) == await store.put(CONTENT)
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())  # noqa: ASYNC240
    assert files == [(await store.put(CONTENT)).sha256]


async def test_what_is_not_what_its_name_says_is_refused(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    reference = await store.put(CONTENT)
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]  # noqa: ASYNC240
    path.write_bytes(b"forged")
    with pytest.raises(BlobUnavailable, match="found content that is blob") as caught:
        await store.get(reference)
    assert not caught.value.retryable


async def test_what_is_not_there_may_come(tmp_path: Path) -> None:
    with pytest.raises(BlobUnavailable, match=r"give every worker the same blobs\.url") as caught:
        await BlobStore(str(tmp_path)).get(BlobReference("0" * 64, 3))
    assert caught.value.retryable


async def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BlobUnavailable, match="cannot be written to"):
        await BlobStore(str(tmp_path / "file")).put(CONTENT)


def test_an_url_that_nobody_understands_is_refused_in_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"expected blobs\.url as a directory or an fsspec URL"):
        BlobStore.of(Settings(blobs=BlobSettings(url="nosuch://place")))


def test_blobs_are_in_the_data_directory_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    assert str(tmp_path / "data" / "blobs") in BlobStore.of(Settings(data_dir=tmp_path / "data"))._url


@given(st.binary(max_size=32).map(lambda raw: raw.hex().ljust(64, "0")), st.integers(0, 10**12 - 1))
def test_a_reference_survives_its_text(sha256: str, size: int) -> None:
    reference = BlobReference(sha256, size)
    assert BlobReference.parse(str(reference)) == reference


@given(st.text(max_size=100) | st.just("rs1.key.body"))
def test_other_texts_are_no_references(text: str) -> None:
    assert BlobReference.parse(text) is None or text.startswith("blob.")
