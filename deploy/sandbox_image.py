"""Makes the image that sandboxes are made of when a task names none: bash, git, patch, Python and pytest, and the user agent.

It is built from deploy/sandbox.Dockerfile. Where no registry answers, it is packed from the packages that are installed here.

    python deploy/sandbox_image.py              # rollstream-sandbox
    python deploy/sandbox_image.py --pack my-image
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

# Beside this file, from wherever it is run.
sys.path.insert(0, str(Path(__file__).parents[1]))

from deploy.hostpack import PackagesMissing, Recipe, pack

IMAGE = "rollstream-sandbox"
DOCKERFILE = Path(__file__).with_name("sandbox.Dockerfile")
PACKAGES = ("ca-certificates", "diffutils", "git", "gzip", "mawk", "patch", "python3", "python3-pytest")
REGISTRY_TIMEOUT_S = 20

RECIPE = Recipe(
    packages=PACKAGES,
    texts={
        "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\n"
        "agent:x:1000:1000:agent:/home/agent:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "/etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
        "/etc/gitconfig": "[safe]\n\tdirectory = *\n[user]\n\tname = agent\n\temail = agent@sandbox.invalid\n",
    },
    links={"/usr/bin/awk": "mawk", "/usr/bin/python": "python3"},
    owned=["/home/agent"],
    instructions=["ENV PYTHONDONTWRITEBYTECODE=1", "WORKDIR /workspace", 'CMD ["/bin/bash"]'],
)


def base_image() -> str:
    """What the Dockerfile builds on."""
    return next(line.split()[1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("FROM "))


def can_build() -> bool:
    """Whether the engine has the base image, or can fetch it."""
    here = subprocess.run(["docker", "image", "inspect", base_image()], capture_output=True, check=False)
    if here.returncode == 0:
        return True
    try:
        pulled = subprocess.run(
            ["docker", "pull", "-q", base_image()], capture_output=True, timeout=REGISTRY_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return pulled.returncode == 0


def build(tag: str) -> None:
    """Build the Dockerfile, which needs a registry and a mirror of Debian."""
    command = ["docker", "build", "-q", "--force-rm", "-t", tag, "-f", str(DOCKERFILE), str(DOCKERFILE.parent)]
    # The classic builder: Debian's engine has no other.
    subprocess.run(command, env=os.environ | {"DOCKER_BUILDKIT": "0"}, stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the image for sandboxes.", epilog="example: make sandbox-image")
    parser.add_argument("tag", nargs="?", default=IMAGE)
    parser.add_argument("--pack", action="store_true", help="pack it from installed packages, and ask no registry")
    arguments = parser.parse_args()
    try:
        if not arguments.pack and can_build():
            build(arguments.tag)
            print(f"built {arguments.tag} from {DOCKERFILE.name}")
        else:
            pack(arguments.tag, RECIPE)
            print(f"packed {arguments.tag} from the packages that are installed here")
    except PackagesMissing as error:
        sys.exit(f"error: no registry answers, and {error}")
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"error: {error}; `docker version` says whether an engine answers")


if __name__ == "__main__":
    main()
