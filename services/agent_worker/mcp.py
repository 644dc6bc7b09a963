"""The environment's tools for a program in a box: Model Context Protocol over HTTP, as far as tools go.

Calls are carried out one after the other, in the order in which they come, as any agent's actions are. What the environment
fails at is kept: the program is told that a call failed, and the session ends as the environment's failure.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollstream.errors import BoundaryFailure
from schemas.action import ObservationReturned, ToolCall
from schemas.values import JsonObject, text_of, tool_names
from services.agent_worker.harnesses.protocol import Mistake
from services.agent_worker.harnesses.tools import read_call

PROTOCOL = "2025-06-18"
VERSIONS = frozenset({"2024-11-05", "2025-03-26", PROTOCOL})
METHOD_NOT_FOUND, INVALID_REQUEST = -32601, -32600
OVER = "the episode is over: nothing more can be done"

Act = Callable[[ToolCall], Awaitable[ObservationReturned]]


class ToolDesk:
    """Answers one session's calls of tools."""

    def __init__(self, tools: Sequence[JsonObject], most: int) -> None:
        self._tools = list(tools)
        self._names = tool_names(tools)
        self._left = most
        self._turn = asyncio.Lock()
        self._act: Act | None = None
        self._count = 0
        self.failure: BoundaryFailure | None = None
        """What the environment failed at, if it did."""
        self.ended: ObservationReturned | None = None
        """With which the world came to its end."""

    def carry_out(self, act: Act) -> None:
        """Say what becomes of calls; before, there are none."""
        self._act = act

    async def answer(self, request: JsonObject) -> JsonObject | None:
        """The response to a JSON-RPC request; None for what wants none."""
        method, name = request.get("method"), request.get("id")
        if not isinstance(method, str):
            return _error(name, INVALID_REQUEST, "expected a method")
        if name is None:
            return None
        params = request.get("params")
        params = params if isinstance(params, dict) else {}
        match method:
            case "initialize":
                asked = params.get("protocolVersion")
                version = asked if asked in VERSIONS else PROTOCOL
                server = {"name": "rollstream", "version": "1"}
                return _result(name, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server})
            case "ping":
                return _result(name, {})
            case "tools/list":
                return _result(name, {"tools": [described(tool) for tool in self._tools]})
            case "tools/call":
                text, failed = await self._call(params)
                return _result(name, {"content": [{"type": "text", "text": text}], "isError": failed})
            case _:
                return _error(name, METHOD_NOT_FOUND, f"there is no method {method[:100]}")

    async def _call(self, params: JsonObject) -> tuple[str, bool]:
        """What a call comes to, as text, and whether it failed."""
        async with self._turn:
            function = {"name": params.get("name"), "arguments": params.get("arguments")}
            read = read_call({"id": f"call-{self._count}", "function": function}, self._names)
            if isinstance(read, Mistake):
                return text_of(read.reply), True
            if self._act is None or self._left <= 0 or self.failure is not None or self.ended is not None:
                return OVER, True
            self._left -= 1
            self._count += 1
            try:
                observed = await self._act(read)
            except BoundaryFailure as error:
                self.failure = error
                return "the environment failed", True
            if observed.done or observed.truncated:
                self.ended = observed
            return "\n".join(text_of(message) for message in observed.messages), False


def described(tool: JsonObject) -> JsonObject:
    """An OpenAI function tool, as this protocol describes it."""
    function = tool.get("function")
    function = function if isinstance(function, dict) else {}
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function.get("name"), "description": function.get("description") or "", "inputSchema": schema}


def _result(name: object, result: JsonObject) -> JsonObject:
    return {"jsonrpc": "2.0", "id": name, "result": result}


def _error(name: object, code: int, message: str) -> JsonObject:
    return {"jsonrpc": "2.0", "id": name, "error": {"code": code, "message": message}}
