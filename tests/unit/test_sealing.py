"""Sealed tickets open for their own session, here, unaltered; everything else is refused in one sentence."""

from base64 import b64encode, urlsafe_b64decode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from pydantic import SecretStr

from rollstream.errors import UsageError
from rollstream.sealing import KEY_BYTES, Sealer, TicketRefused, ensure_key_file, key_id, load_sealer
from rollstream.settings import Settings

OLD, NEW = b"o" * KEY_BYTES, b"n" * KEY_BYTES
SEALER = Sealer([NEW])
GRADING = b'{"row": {"answer": "42"}}'


def encoded(*keys: bytes) -> SecretStr:
    return SecretStr(", ".join(b64encode(key).decode() for key in keys))


@given(st.binary(), st.text(min_size=1))
def test_whatever_is_sealed_for_a_session_opens_for_it(content: bytes, session: str) -> None:
    assert SEALER.unseal(SEALER.seal(content, session), session) == content


def test_a_ticket_shows_nothing_of_what_it_holds_and_none_is_like_another() -> None:
    one, two = SEALER.seal(GRADING, "s1"), SEALER.seal(GRADING, "s1")
    assert one != two
    assert one.startswith(f"rs1.{key_id(NEW)}.")
    assert b"answer" not in urlsafe_b64decode(one.split(".")[2])


def test_a_ticket_moved_to_another_session_is_refused() -> None:
    with pytest.raises(TicketRefused, match="does not belong to session s2, or was altered"):
        SEALER.unseal(SEALER.seal(GRADING, "s1"), "s2")


TICKET = SEALER.seal(GRADING, "s1")


@given(st.integers(0, len(TICKET) - 1), st.characters())
def test_a_ticket_with_any_character_altered_is_refused(place: int, other: str) -> None:
    altered = TICKET[:place] + other + TICKET[place + 1 :]
    if altered != TICKET:
        with pytest.raises(TicketRefused):
            SEALER.unseal(altered, "s1")


@given(st.integers(0, len(TICKET) - 1), st.text(min_size=1, max_size=3))
def test_a_ticket_with_anything_put_in_or_cut_off_is_refused(place: int, more: str) -> None:
    for altered in (TICKET[:place], TICKET[:place] + more + TICKET[place:], TICKET + more):
        with pytest.raises(TicketRefused):
            SEALER.unseal(altered, "s1")


@pytest.mark.parametrize(
    "text", ["", "x", "rs1", "rs1..", f"rs1.{key_id(NEW)}.", f"rs1.{key_id(NEW)}.AAAA", "a.b.c.d", "é.é.é"]
)
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(TicketRefused):
        SEALER.unseal(text, "s1")


def test_a_ticket_of_a_newer_format_is_refused() -> None:
    with pytest.raises(TicketRefused, match="ticket of format 'rs9'"):
        SEALER.unseal(TICKET.replace("rs1.", "rs9.", 1), "s1")


def test_a_ticket_sealed_with_a_key_that_is_not_here_is_refused_with_the_remedy() -> None:
    with pytest.raises(TicketRefused) as caught:
        SEALER.unseal(Sealer([OLD]).seal(GRADING, "s1"), "s1")
    assert key_id(OLD) in str(caught.value)
    assert "give every worker the same ROLLSTREAM_SEALING_KEY" in str(caught.value)
    assert (caught.value.stage, caught.value.kind, caught.value.retryable) == ("verification", "ticket_refused", False)


def test_after_a_rotation_old_tickets_open_and_new_ones_use_the_new_key() -> None:
    rotated = Sealer([NEW, OLD])
    assert rotated.unseal(Sealer([OLD]).seal(GRADING, "s1"), "s1") == GRADING
    assert SEALER.unseal(rotated.seal(GRADING, "s1"), "s1") == GRADING


def test_keys_come_from_the_settings_and_the_first_seals() -> None:
    sealer = load_sealer(Settings(sealing_key=encoded(NEW, OLD)))
    assert SEALER.unseal(sealer.seal(GRADING, "s1"), "s1") == GRADING
    assert sealer.unseal(Sealer([OLD]).seal(GRADING, "s1"), "s1") == GRADING


@pytest.mark.parametrize("text", ["", "secret-4711", b64encode(b"short").decode(), f"{b64encode(NEW).decode()},"])
def test_a_key_that_is_none_is_refused_with_a_way_to_make_one_and_not_quoted(text: str) -> None:
    with pytest.raises(UsageError, match=r"ROLLSTREAM_SEALING_KEY: expected base64 of 32 bytes .*urandom") as caught:
        load_sealer(Settings(sealing_key=SecretStr(text)))
    assert "secret-4711" not in str(caught.value)


def test_a_key_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(UsageError, match="expected 32 bytes, found 5"):
        Sealer([b"short"])


def test_without_a_setting_the_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    first, second = (load_sealer(Settings(data_dir=tmp_path)) for _ in range(2))
    assert second.unseal(first.seal(GRADING, "s1"), "s1") == GRADING
    key = tmp_path / "keys" / "sealing.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in key.parent.iterdir()] == ["sealing.key"]


def test_processes_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(ensure_key_file, [tmp_path] * 64))
    assert len(keys) == 1


def test_a_broken_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "sealing.key").write_text("")
    with pytest.raises(UsageError, match=r"sealing key in .*sealing\.key: expected base64"):
        load_sealer(Settings(data_dir=tmp_path))
