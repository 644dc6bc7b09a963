"""Images out of installed packages: what is needed is in them, and they are the same every time."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.hostpack import Package, PackagesMissing, Recipe, closure, pack
from tests.docker.packed_images import remove

pytestmark = pytest.mark.docker

TAG = "rollstream-test:hostpack"


@pytest.fixture
def tag(engine: None) -> Iterator[str]:
    yield TAG
    remove(TAG)
    remove(f"{TAG}-again")


def run(*command: str) -> str:
    return subprocess.run(["docker", "run", "--rm", TAG, *command], capture_output=True, text=True, check=True).stdout.strip()


def layer(tag: str) -> str:
    command = ["docker", "image", "inspect", "-f", "{{.RootFS.Layers}}", tag]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_packed_image_runs_its_programs_and_holds_the_recipes_files(tag: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("copied")
    recipe = Recipe(
        packages=["python3"],
        copies={tmp_path: "/opt/copied"},
        texts={"/opt/hello": "#!/bin/sh\necho hello\n"},
        links={"/usr/bin/hello": "/opt/hello"},
        owned=["/srv/mine"],
        instructions=["USER user"],
    )

    pack(tag, recipe)

    assert run("python3", "-c", "import ssl, sqlite3; print('python')") == "python"
    assert run("hello") == "hello"
    assert run("cat", "/opt/copied/folder/file") == "copied"
    assert run("sh", "-c", "id -un; touch /srv/mine/x /workspace/x && stat -c %u /usr /srv/mine") == "user\n0\n1000"


def test_the_same_recipe_packs_the_same_layer(tag: str) -> None:
    recipe = Recipe(packages=[])

    pack(tag, recipe)
    pack(f"{tag}-again", recipe)

    assert layer(tag) == layer(f"{tag}-again")


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(PackagesMissing, match="apt-get install -y no-such-package"):
        pack(TAG, Recipe(packages=["no-such-package"]))


def test_dependencies_follow_the_first_installed_alternative_and_what_others_provide() -> None:
    installed = [
        Package("app", frozenset(), (("missing", "awk"), ("libc",))),
        Package("mawk", frozenset({"awk"}), ()),
        Package("libc", frozenset(), (("app",),)),
        Package("other", frozenset(), ()),
    ]

    assert closure(["app"], installed) == ["app", "libc", "mawk"]
