"""What every sandbox provider must do, as tests to inherit.

    class TestMine(SandboxConformance):
        def provider(self):
            return MyProvider("agent")

Boxes of the suite need `sh`, `tar`, `cat`, `dd` and `python3`. What a provider does not promise (`enforces`) it must refuse:
each limit and each network is tested one way or the other, and none is skipped.
"""

import asyncio
import json
import os
import shutil
import tempfile
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

from rollstream.errors import Refused, SandboxUnavailable
from rollstream.sandboxes.protocol import GATEWAY_SOCKET, Limit, Sandbox, SandboxProvider, Stream
from rollstream.testing.boxes import PATIENCE_S, TAG, beats, in_loop, raises, sh, until
from rollstream.testing.sandbox_files import FilesConformance
from schemas.sandbox import NetworkPolicy

CANARY = "canary-of-the-worker-8d1f"
OUTPUT = 200_000_000
BEAT = "while :; do echo x >> beat; sleep 0.05; done"
ESCAPEES = f"""
(setsid sh -c '{BEAT}' &) ; nohup sh -c '{BEAT}' >/dev/null 2>&1 & sh -c 'trap "" TERM HUP INT; {BEAT}' &
until [ -s beat ]; do sleep 0.05; done; echo away; sleep 100
"""
"""Three that beat, each getting away from its parent in another way."""


class SandboxConformance(FilesConformance):
    """Inherit, under a name that begins with `Test`, and say which provider."""

    # Commands.

    @in_loop
    async def test_a_command_runs_in_the_work_directory_with_what_the_specification_gives_it(self) -> None:
        async with self.box(files={"a/b.txt": "hello"}, env={"FROM_SPEC": "1"}) as box:
            done = await sh(box, 'pwd; cat a/b.txt; echo "$FROM_SPEC$FROM_CALL"; touch new', env={"FROM_CALL": "2"})
            assert done.stdout.text == f"{box.workdir}\nhello12\n", done
            assert done.ok, done

    @in_loop
    async def test_a_failed_command_is_a_result(self) -> None:
        async with self.box() as box:
            failed = await sh(box, "echo out; echo err >&2; exit 7")
            assert (failed.exit_code, failed.stdout.text, failed.stderr.text) == (7, "out\n", "err\n")
            assert not failed.oom_killed
            assert not failed.timed_out
            assert (await sh(box, "kill -9 $$")).exit_code == 137
            assert (await box.exec(["no-such-program-anywhere"])).exit_code in (126, 127)
            assert (await box.exec(["true"], cwd="/no/such/directory")).exit_code in (126, 127)
            assert (await sh(box, "true")).ok

    @in_loop
    async def test_input_of_any_size_arrives_and_may_go_unread(self) -> None:
        content = os.urandom(3_000_000)
        async with self.box() as box:
            echoed = await box.exec(["cat"], stdin=content, max_output_bytes=4_000_000, timeout_s=PATIENCE_S)
            assert echoed.stdout.data == content
            assert (await box.exec(["true"], stdin=content, timeout_s=PATIENCE_S)).ok

    @in_loop
    async def test_output_that_is_no_text_survives(self) -> None:
        async with self.box() as box:
            done = await sh(box, r"printf '\377\000\303\050ok'")
            assert done.stdout.data == b"\xff\x00\xc3\x28ok"
            assert done.stdout.text == "\\xff\x00\\xc3(ok"

    @in_loop
    async def test_two_hundred_megabytes_on_one_line_cost_bounded_memory(self) -> None:
        async with self.box() as box:
            tracemalloc.start()
            try:
                done = await sh(box, f"echo begin; head -c {OUTPUT} /dev/zero | tr '\\0' x; echo end", timeout_s=240)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert done.stdout.size == OUTPUT + len("begin\nend\n")
            assert done.stdout.truncated
            assert f"[truncated by rollstream: {done.stdout.size} bytes in all, 1048576 kept]" in done.stdout.text
            assert done.stdout.text.startswith("begin\nxxx")
            assert done.stdout.text.endswith("xxxend\n")
            assert peak < 24 * 2**20, f"{peak >> 20} MiB for 1 MiB of output that is kept"

    @in_loop
    async def test_output_is_streamed_while_the_command_runs_and_commands_run_side_by_side(self) -> None:
        seen = asyncio.Event()
        heard: list[tuple[Stream, bytes]] = []

        async def listen(stream: Stream, chunk: bytes) -> None:
            heard.append((stream, chunk))
            seen.set()

        async with self.box() as box:
            waits = asyncio.create_task(
                sh(box, "echo first; until [ -e go ]; do sleep 0.05; done; echo second", on_output=listen)
            )
            async with asyncio.timeout(PATIENCE_S):
                await seen.wait()
            assert heard == [("stdout", b"first\n")]
            await box.write("go", b"")
            assert (await waits).stdout.text == "first\nsecond\n"

    @in_loop
    async def test_what_a_command_leaves_running_holds_nobody_up_and_stays(self) -> None:
        async with self.box() as box:
            done = await sh(box, f"({BEAT}) & echo done")
            assert done.stdout.text == "done\n"
            assert done.ok
            assert done.duration_s < PATIENCE_S
            await until(lambda: beats(box), more_than=1)

    # Cutting short.

    @in_loop
    async def test_a_timeout_kills_everything_that_the_command_started(self) -> None:
        async with self.box() as box:
            # Time enough to start everything, also on a machine that is busy.
            done = await sh(box, ESCAPEES, timeout_s=8)
            assert done.timed_out
            assert done.exit_code is None
            assert done.stdout.text == "away\n"
            await self._is_quiet(box)

    @in_loop
    async def test_a_call_that_is_cancelled_leaves_nothing_running(self) -> None:
        away = asyncio.Event()

        async def listen(stream: Stream, chunk: bytes) -> None:
            away.set()

        async with self.box() as box:
            call = asyncio.create_task(sh(box, ESCAPEES, on_output=listen))
            async with asyncio.timeout(PATIENCE_S):
                await away.wait()
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
            await self._is_quiet(box)

    @in_loop
    async def test_kill_ends_what_runs_and_leaves_the_box(self) -> None:
        async with self.box() as box:
            await sh(box, f"({BEAT}) >/dev/null 2>&1 & true")
            await until(lambda: beats(box), more_than=0)
            await box.kill()
            await self._is_quiet(box)

    @in_loop
    async def test_a_listener_that_fails_ends_the_command_with_its_own_failure(self) -> None:
        async def listen(stream: Stream, chunk: bytes) -> None:
            raise OSError("the listener's own")

        async with self.box() as box:
            await raises(OSError, sh(box, ESCAPEES, on_output=listen))
            await self._is_quiet(box)

    async def _is_quiet(self, box: Sandbox) -> None:
        before = await beats(box)
        await sh(box, "sleep 0.5")
        assert await beats(box) == before, "something that was killed still writes"

    @in_loop
    async def test_a_fork_bomb_is_held_and_killed_or_its_limit_refused(self) -> None:
        if await self._refused_if_open("pids", 64):
            return
        async with self.box(pids=64) as box:
            done = await sh(box, "bomb() { bomb | bomb & }; bomb; sleep 100", timeout_s=3)
            assert done.timed_out
            counted = await sh(box, "ls /proc | grep -c '^[0-9]'")
            assert int(counted.stdout.text) < 16, counted

    # Limits: each holds, or is refused.

    @in_loop
    async def test_memory_is_limited_and_its_want_told_apart_or_the_limit_is_refused(self) -> None:
        if await self._refused_if_open("memory_mib", 64):
            return
        async with self.box(memory_mib=64) as box:
            killed = await box.exec(["python3", "-c", "x = bytearray(300 << 20); print('has it')"])
            assert killed.oom_killed
            assert not killed.ok
            assert "has it" not in killed.stdout.text
            failed = await sh(box, "exit 137")
            assert not failed.oom_killed
            assert (await sh(box, "echo alive")).stdout.text == "alive\n"

    @in_loop
    async def test_disk_is_limited_or_the_limit_is_refused(self) -> None:
        if await self._refused_if_open("disk_mib", 8):
            return
        async with self.box(disk_mib=8) as box:
            for folder in (box.workdir, "/tmp", "$HOME", "/dev/shm"):
                full = await sh(
                    box, f"dd if=/dev/zero of={folder}/big bs=1048576 count=64; code=$?; rm -f {folder}/big; exit $code"
                )
                assert not full.ok, f"64 MiB fit into {folder}"
            assert (await sh(box, "echo fits > small && cat small")).stdout.text == "fits\n"

    @in_loop
    async def test_processor_time_is_limited_or_the_limit_is_refused(self) -> None:
        if await self._refused_if_open("cpus", 0.3):
            return
        spin = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time() / 2)"
        async with self.box(cpus=0.3) as box:
            done = await box.exec(["python3", "-c", spin])
            assert float(done.stdout.text) < 0.6, f"used {done.stdout.text} of a processor, and may use 0.3"

    async def _refused_if_open(self, limit: Limit, value: float) -> bool:
        """For a limit that is not promised: that it is refused, and nothing left behind."""
        async with self.providing() as provider:
            if limit in (await provider.enforces()).limits:
                return False
            await self._refused(provider, limit, **{limit: value})
            return True

    async def _refused(self, provider: SandboxProvider, word: str, **changes: Any) -> None:
        box = await self.made(provider, **changes)
        refused = None
        try:
            await box.start()
        except Refused as error:
            refused = error
        finally:
            await box.close()
        assert refused is not None, f"a box with {changes} was started, although that is not enforced"
        assert word in str(refused), f"the sentence does not name {word}: {refused}"
        assert provider.name in str(refused), f"the sentence does not name the provider: {refused}"
        assert not refused.retryable
        assert box.id not in {found.id for found in await provider.found()}

    # Networks.

    @in_loop
    async def test_a_network_that_cannot_be_held_is_refused(self) -> None:
        async with self.providing() as provider:
            can = await provider.enforces()
            for network in get_args(NetworkPolicy):
                if network not in can.networks:
                    await self._refused(provider, network, network=network)

    @in_loop
    async def test_no_network_is_none_at_all(self) -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", 0)
        port = server.sockets[0].getsockname()[1]
        look = (
            "import json, socket\n"
            "def reached(host):\n"
            f"    try: socket.create_connection((host, {port}), 2); return True\n"
            "    except OSError: return False\n"
            "names = [line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]\n"
            "print(json.dumps([names, [h for h in ('127.0.0.1', '172.17.0.1', 'localhost') if reached(h)]]))"
        )
        async with server:
            for network in await self._networks("none", "gateway"):
                async with (
                    self._socket() as path,
                    self.box(network=network, gateway=path if network == "gateway" else None) as box,
                ):
                    interfaces, reached = json.loads((await box.exec(["python3", "-c", look])).stdout.text)
                    assert set(interfaces) <= {"lo"}, network
                    assert reached == [], network

    @in_loop
    async def test_the_gateway_is_a_socket_in_the_box(self) -> None:
        ask = (
            "import socket\n"
            "s = socket.socket(socket.AF_UNIX)\n"
            f"s.connect({GATEWAY_SOCKET!r}); s.sendall(b'ping\\n'); print(s.recv(99).decode())"
        )
        for network in await self._networks("gateway"):
            async with self._socket() as socket, self.box(network=network, gateway=socket) as box:
                answered = await box.exec(["python3", "-c", ask])
                assert answered.stdout.text == "gateway heard ping\n\n", answered

    async def _networks(self, *wanted: str) -> list[str]:
        async with self.providing() as provider:
            can = await provider.enforces()
        return [network for network in wanted if network in can.networks]

    @asynccontextmanager
    async def _socket(self) -> AsyncIterator[Path]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"gateway heard " + await reader.readline())
            writer.close()

        folder = Path(tempfile.mkdtemp(prefix="rollstream-gateway-"))
        folder.chmod(0o755)
        server = await asyncio.start_unix_server(answer, folder / "s")
        (folder / "s").chmod(0o666)
        try:
            async with server:
                yield folder / "s"
        finally:
            shutil.rmtree(folder)

    # Isolation.

    @in_loop
    async def test_the_worker_is_invisible(self) -> None:
        with patch.dict(os.environ, {"CONFORMANCE_CANARY": CANARY}):
            async with self.box() as box:
                assert CANARY not in (await sh(box, "env; cat /proc/self/environ /proc/1/environ 2>/dev/null")).stdout.text

    @in_loop
    async def test_commands_have_no_rights_if_boxes_are_isolated(self) -> None:
        async with self.providing() as provider:
            isolates = (await provider.enforces()).isolates
        async with self.box() as box:
            status = (
                await sh(box, "id -u; grep -E '^(CapPrm|CapEff|CapBnd|NoNewPrivs)' /proc/self/status")
            ).stdout.text.split()
            if isolates:
                assert status[0] == "1000"
                assert dict(zip(status[1::2], status[2::2], strict=True)) == {
                    "CapPrm:": "0" * 16,
                    "CapEff:": "0" * 16,
                    "CapBnd:": "0" * 16,
                    "NoNewPrivs:": "1",
                }
                for folder in ("/", "/usr", "/etc", "/usr/bin", "/dev", "/proc/sys/kernel"):
                    assert not (await sh(box, f"touch {folder}/x")).ok, f"{folder} can be written"
            else:
                assert status[0] == str(os.getuid())

    @in_loop
    async def test_boxes_do_not_see_each_other(self) -> None:
        async with self.box() as one, self.box() as other:
            await one.write("mine", b"1")
            await sh(one, "sleep 4711 >/dev/null 2>&1 & true")
            assert (await sh(other, "ls")).stdout.text == ""
            await other.kill()
            assert "4711" in (await sh(one, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.text

    @in_loop
    async def test_boxes_that_start_and_work_at_once_do_not_disturb_each_other(self) -> None:
        async def work(number: int) -> list[str]:
            async with self.box() as box:
                return [(await sh(box, f"echo {number}; sleep 0.01; echo {number}")).stdout.text for _ in range(8)]

        found = await asyncio.gather(*(work(number) for number in range(8)))
        assert found == [[f"{number}\n{number}\n"] * 8 for number in range(8)]

    # Life and death.

    @in_loop
    async def test_a_closed_box_is_gone_with_all_it_ran(self) -> None:
        async with self.providing() as provider:
            box = await self.made(provider)
            await box.close()
            await box.start()
            await sh(box, "sleep 4711 >/dev/null 2>&1 & true")
            found = {one.id: one for one in await provider.found()}
            await box.close()
            await box.close()
            assert found[box.id].tag == TAG
            assert abs(datetime.now(UTC) - found[box.id].created_at) < timedelta(minutes=5)
            assert box.id not in {one.id for one in await provider.found()}
            await raises(SandboxUnavailable, box.exec(["true"]))

    @in_loop
    async def test_a_box_that_somebody_else_destroyed_is_unavailable(self) -> None:
        async with self.box() as box, self.providing() as other:
            await other.destroy(box.id)
            await other.destroy(box.id)
            await raises(SandboxUnavailable, box.exec(["true"]))
            assert box.id not in {found.id for found in await other.found()}

    @in_loop
    async def test_a_box_that_is_destroyed_under_a_command_fails_no_command(self) -> None:
        away = asyncio.Event()

        async def listen(stream: Stream, chunk: bytes) -> None:
            away.set()

        async with self.box() as box, self.providing() as other:
            call = asyncio.create_task(sh(box, "echo away; sleep 100", on_output=listen))
            async with asyncio.timeout(PATIENCE_S):
                await away.wait()
            await other.destroy(box.id)
            await raises(SandboxUnavailable, call)

    @in_loop
    async def test_a_box_ends_by_itself_when_its_time_is_over(self) -> None:
        async with self.box(ttl_s=2) as box:
            call = sh(box, "sleep 100")
            async with asyncio.timeout(PATIENCE_S):
                await raises(SandboxUnavailable, call)
