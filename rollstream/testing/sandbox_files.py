"""What every sandbox provider must do with files, in and out of a box: a part of the suite in `sandboxes`."""

import os
import tempfile
from pathlib import Path

from rollstream.errors import Refused
from rollstream.sandboxes.protocol import DownloadTooLarge
from rollstream.testing.boxes import BoxMaking, in_loop, raises, sh


class FilesConformance(BoxMaking):
    """Inherited with all the others."""

    @in_loop
    async def test_a_tree_comes_back_as_it_went_in(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder, "tree")
            (tree / "sub" / "empty").mkdir(parents=True)
            (tree / "binary").write_bytes(bytes(range(256)) * 5000)
            (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
            (tree / "run.sh").chmod(0o755)
            (tree / "sub" / "naïve name\n").write_text("odd")
            (tree / "sub" / "link").symlink_to("../run.sh")
            async with self.box() as box:
                await box.upload(tree, "deep/er/copy")
                ran = await box.exec(["deep/er/copy/sub/link"])
                await sh(box, "echo more >> deep/er/copy/run.sh")
                back = Path(folder, "back")
                got = await box.download("deep/er/copy", back, max_bytes=10_000_000)
                assert await box.read("deep/er/copy/binary", max_bytes=2_000_000) == bytes(range(256)) * 5000
                assert await box.read(f"{box.workdir}/deep/er/copy/run.sh", max_bytes=100) == b"#!/bin/sh\necho ran\nmore\n"
            assert ran.stdout.text == "ran\n"
            assert (got.files, got.left_out) == (3, ())
            assert (back / "binary").read_bytes() == bytes(range(256)) * 5000
            assert (back / "run.sh").stat().st_mode & 0o111
            assert (back / "sub" / "empty").is_dir()
            assert (back / "sub" / "naïve name\n").read_text() == "odd"
            assert os.readlink(back / "sub" / "link") == "../run.sh"

    @in_loop
    async def test_a_download_follows_no_link_and_makes_none_that_leads_out(self) -> None:
        plant = (
            "mkdir -p t/d && cd t && echo in > d/file && ln -s d/file good && ln -s /etc/passwd absolute && ln -s /etc etc"
            " && ln -s ../../../etc up && ln -s . here && ln -s here/../../x sly && ln -s d dirlink && mkfifo pipe"
        )
        with tempfile.TemporaryDirectory() as folder:
            async with self.box() as box:
                assert (await sh(box, plant)).ok
                got = await box.download("t", Path(folder, "t"), max_bytes=1_000_000)
                for link in ("t/absolute", "t/good"):
                    await raises(FileNotFoundError, box.read(link, max_bytes=1_000_000))
            assert set(got.left_out) >= {"absolute", "up", "sly", "etc"}
            assert {path.name for path in Path(folder, "t").iterdir()} == {"d", "good", "here", "dirlink"}
            assert got.files == 1

    @in_loop
    async def test_a_specification_whose_files_do_not_fit_is_refused(self) -> None:
        async with self.providing() as provider:
            box = await self.made(provider, files={"dir/file": "x", "dir/file/below": "y"})
            await raises(Refused, box.start())
            assert box.id not in {found.id for found in await provider.found()}

    @in_loop
    async def test_what_the_box_cannot_take_is_for_the_caller_to_hear(self) -> None:
        async with self.providing() as provider:
            limited = "disk_mib" in (await provider.enforces()).limits
        async with self.box() as box:
            await box.write("file", b"in the way")
            await raises(OSError, box.write("file/below", b""))
            if limited:
                await raises(OSError, box.write("big", b"x" * 64 * 2**20))
            assert await box.read("file", max_bytes=100) == b"in the way"

    @in_loop
    async def test_more_than_is_wanted_is_not_taken(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with self.box() as box:
                await sh(
                    box,
                    "mkdir many && cd many && for n in 1 2 3 4 5; do echo $n > $n; done; head -c 9000000 /dev/zero > ../big",
                )
                await raises(DownloadTooLarge, box.download("big", Path(folder, "big"), max_bytes=1000))
                await raises(DownloadTooLarge, box.download("many", Path(folder, "many"), max_bytes=1000, max_files=3))
                await raises(DownloadTooLarge, box.read("big", max_bytes=8_999_999))
                await raises(FileNotFoundError, box.download("missing", Path(folder, "missing"), max_bytes=1000))
            assert list(Path(folder).iterdir()) == []
