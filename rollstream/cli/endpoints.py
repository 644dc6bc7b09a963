"""Asking a model server which models it serves, without a client library: for checks before anything is published."""

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from rollstream.settings import ModelSettings

TIMEOUT_S = 3.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024

State = Literal["answers", "unlisted", "unauthorised", "unreachable"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a model server said to `GET /models`."""

    base_url: str
    state: State
    """`unlisted`: it answers, but does not say which models it serves."""
    models: tuple[str, ...] = ()
    detail: str = ""
    """Half a sentence, when it did not answer as hoped."""

    def serves(self, model: str) -> bool | None:
        """None if the server does not tell."""
        return model in self.models if self.state == "answers" else None


def ask(settings: ModelSettings, timeout_s: float = TIMEOUT_S) -> Endpoint:
    """Ask one endpoint. Never raises: not answering is an answer."""
    try:
        request = urllib.request.Request(f"{settings.base_url.rstrip('/')}/models")
        if key := os.environ.get(settings.api_key_env):
            request.add_header("Authorization", f"Bearer {key}")
        # A proxy cannot reach this machine's own loopback address.
        handlers = [urllib.request.ProxyHandler({})] if _is_loopback(settings.base_url) else []
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            return _answered(settings.base_url, response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return Endpoint(
                settings.base_url, "unauthorised", detail=f"refuses the key in {settings.api_key_env} ({error.code})"
            )
        return Endpoint(settings.base_url, "unlisted", detail=f"answers {error.code} to /models")
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return Endpoint(settings.base_url, "unreachable", detail=f"does not answer ({reason})")


def _answered(base_url: str, body: bytes) -> Endpoint:
    try:
        models = tuple(str(entry["id"]) for entry in json.loads(body)["data"])
    except (ValueError, KeyError, TypeError):
        return Endpoint(base_url, "unlisted", detail="answers /models with something else than a list of models")
    return Endpoint(base_url, "answers", models)


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
