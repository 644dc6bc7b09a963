"""A Docker engine as an async client: the SDK's calls in threads, and what it fails with told as ours.

`NotFound` alone passes: only the caller knows whether that is a failure.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import docker
import docker.errors
import docker.utils
import requests.exceptions

from rollstream.errors import Refused, SandboxUnavailable, Stage, UsageError

R = TypeVar("R")

DEFAULT_HOST = "unix:///var/run/docker.sock"
DEFAULT_IMAGE = "rollstream-sandbox"
API_THREADS = 16
API_TIMEOUT_S = 60
ATTEMPTS = 20


class DockerEngine:
    """One engine, at `unix://` or plain `tcp://`. Asked nothing before its first use."""

    def __init__(self, stage: Stage, host: str | None = None) -> None:
        """
        Raises:
            UsageError: the engine is addressed in a way that commands cannot be streamed over.
        """
        self.address = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        if not self.address.startswith(("unix://", "tcp://")) or os.environ.get("DOCKER_TLS_VERIFY"):
            raise UsageError(
                f"expected a Docker engine at unix:// or tcp:// without TLS, found {self.address}: set DOCKER_HOST"
            )
        self.info: Mapping[str, Any] = {}
        """What the engine says of itself, once it is connected."""
        self._stage: Stage = stage
        self._threads = ThreadPoolExecutor(API_THREADS, "docker")
        self._client: docker.APIClient | None = None
        self._pulls: dict[str, asyncio.Lock] = {}
        self._connecting = asyncio.Lock()

    async def api(self) -> docker.APIClient:
        """The client, connected at first use."""
        async with self._connecting:
            if self._client is None:
                make = partial(docker.APIClient, self.address, version="auto", timeout=API_TIMEOUT_S, num_pools=API_THREADS)
                client = await self.call(make)
                self.info = await self.call(client.info)
                self._client = client
        return self._client

    async def call(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """A blocking call of the SDK, in a thread.

        Raises:
            SandboxUnavailable: the engine does not answer, or fails.
            docker.errors.NotFound: it has no such thing.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, partial(function, *args, **kwargs))
        except docker.errors.NotFound:
            raise
        except docker.errors.APIError as error:
            raise self.unavailable(f"the engine at {self.address} refuses: {error.explanation or error}") from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise self.unavailable(
                f"no Docker engine answers at {self.address} ({type(error).__name__}): start it, or set DOCKER_HOST"
            ) from error

    def unavailable(self, message: str) -> SandboxUnavailable:
        return SandboxUnavailable(message, stage=self._stage)

    async def remove(self, container: str) -> None:
        """Remove a container and wait until it is gone."""
        api = await self.api()
        for attempt in range(ATTEMPTS):
            try:
                await self.call(api.remove_container, container, force=True, v=True)
            except docker.errors.NotFound:
                return
            except SandboxUnavailable as error:
                # Somebody else, or the engine itself, is at it.
                if "already in progress" not in str(error) or attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(0.1)

    async def ensure_image(self, image: str) -> str:
        """The id of an image, pulled if the engine does not have it.

        Raises:
            Refused: no registry has it.
        """
        api = await self.api()
        async with self._pulls.setdefault(image, asyncio.Lock()):
            try:
                found = await self.call(api.inspect_image, image)
            except docker.errors.NotFound:
                found = await self._pulled(api, image)
        return str(found["Id"])

    async def _pulled(self, api: docker.APIClient, image: str) -> Mapping[str, Any]:
        if image == DEFAULT_IMAGE:
            raise Refused(
                f"the engine at {self.address} has no image {image}: `make sandbox-image` makes it, or name another one",
                stage=self._stage,
                kind="sandbox_image_missing",
            )
        try:
            await self.call(partial(_pull, api, image))
            found: Mapping[str, Any] = await self.call(api.inspect_image, image)
        except docker.errors.NotFound as error:
            message = f"expected the image {image} on the engine or in its registry, found neither: {error.explanation}"
            raise Refused(message, stage=self._stage, kind="sandbox_image_missing") from error
        return found

    async def close(self) -> None:
        if self._client is not None:
            await self.call(self._client.close)
            self._client = None
        self._threads.shutdown(wait=False)


def _pull(api: docker.APIClient, image: str) -> None:
    """
    Raises:
        docker.errors.NotFound: the registry has no such image.
        docker.errors.APIError: it could not be fetched.
    """
    name, tag = docker.utils.parse_repository_tag(image)
    for event in api.pull(name, tag=tag or "latest", stream=True, decode=True):
        if error := event.get("error"):
            absent = "not found" in error or "manifest unknown" in error
            raise (docker.errors.NotFound if absent else docker.errors.APIError)(error, explanation=error)
