"""The instant model server of benchmarks: every request gets the same prebuilt bytes, and nothing is kept.

python -m rollstream.testing.instant_model --answer TEXT
"""

import argparse
import asyncio
import json
import re
import signal
from collections.abc import Mapping, Sequence
from typing import cast

import uvloop

from rollstream.testing.model_apis import chat_body, responses_body
from rollstream.testing.replies import Call, Request, Text, ToolCalls

HOST = "127.0.0.1"


class _Instant(asyncio.Protocol):
    """Just enough HTTP/1.1 to answer a well-behaved client: one prebuilt response a request, in order.

    Of several answers to a path, the one for as many tool results as the request has; the last one for any more.
    """

    def __init__(self, answers: Mapping[bytes, Sequence[bytes]], latency_s: float) -> None:
        self._answers = answers
        self._latency_s = latency_s
        self._pending = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own does not derive from it

    def data_received(self, data: bytes) -> None:
        pending = self._pending + data if self._pending else data
        while (head_end := pending.find(b"\r\n\r\n")) >= 0:
            head = pending[:head_end].lower()
            end = head_end + 4 + _content_length(head)
            if len(pending) < end:
                break
            answers = self._answers.get(head.split(b" ", 2)[1], (_NOT_FOUND,))
            seen = len(_TOOL_RESULT.findall(pending, head_end, end)) if len(answers) > 1 else 0
            pending = pending[end:]
            self._answer(answers[min(seen, len(answers) - 1)])
        self._pending = pending

    def _answer(self, answer: bytes) -> None:
        assert self._transport is not None
        if self._latency_s:
            asyncio.get_running_loop().call_later(self._latency_s, self._transport.write, answer)
        else:
            self._transport.write(answer)


_TOOL_RESULT = re.compile(rb'"role": ?"tool"|"type": ?"function_call_output"')


def _content_length(head: bytes) -> int:
    start = head.find(b"\r\ncontent-length:")
    if start < 0:
        return 0
    end = head.find(b"\r\n", start + 2)
    return int(head[start + 17 : end if end >= 0 else None])


def _http(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status.encode(),
        len(body),
        body,
    )


_NOT_FOUND = _http("404 Not Found", b'{"error": {"message": "no such path here"}}')


async def serve_instantly(answer: str, port: int, latency_s: float, first: Sequence[Call] = ()) -> None:
    """Run the instant server until SIGTERM or Ctrl-C; prints its URL as one line of JSON once it listens.

    Args:
        first: calls of tools that are made one after the other before the answer is given.
    """
    replies: list[Text | ToolCalls] = [*(ToolCalls([call]) for call in first), Text(answer)]
    request = Request(0, "/v1/chat/completions", {}, b'{"model": "instant"}')
    models = json.dumps({"object": "list", "data": [{"id": "instant", "object": "model"}]}).encode()
    answers = {
        b"/v1/chat/completions": [_http("200 OK", json.dumps(chat_body(reply, request)).encode()) for reply in replies],
        b"/v1/responses": [_http("200 OK", json.dumps(responses_body(reply, request)).encode()) for reply in replies],
        b"/v1/models": [_http("200 OK", models)],
    }
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: _Instant(answers, latency_s), HOST, port, backlog=4096)
    print(json.dumps({"base_url": f"http://{HOST}:{server.sockets[0].getsockname()[1]}/v1"}), flush=True)
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rollstream.testing.instant_model",
        description="Give every request the same answer, as fast as possible, on 127.0.0.1. For benchmarks.",
    )
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--answer", required=True, metavar="TEXT", help="text of every answer")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="how long every answer takes")
    parser.add_argument("--tool", metavar="NAME", help="a tool that is called before the answer is given")
    parser.add_argument("--arguments", default="{}", metavar="JSON", help="of that tool")
    parser.add_argument("--calls", type=int, default=1, help="how often it is called, once an answer")
    given = parser.parse_args()
    calls = [Call(given.tool, given.arguments, f"call-{number}") for number in range(given.calls)] if given.tool else []
    uvloop.run(serve_instantly(given.answer, given.port, given.latency_ms / 1000, calls))


if __name__ == "__main__":
    main()
