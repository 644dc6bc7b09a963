"""Output of any size in bounded memory: the beginning, the end, and how much there was."""

from collections import deque

from rollstream.sandboxes.protocol import OnOutput, Output, Stream


class Capture:
    """Keeps at most `limit` bytes of one stream: half of them from its beginning, half from its end."""

    def __init__(self, limit: int) -> None:
        self._head = bytearray()
        self._head_limit = limit - limit // 2
        self._tail: deque[bytes] = deque()
        self._tail_limit = limit // 2
        self._tail_size = 0
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if not chunk:
            return
        self._tail.append(chunk[-self._tail_limit :] if self._tail_limit else b"")
        self._tail_size += len(self._tail[-1])
        while self._tail_size - len(self._tail[0]) >= self._tail_limit and len(self._tail) > 1:
            self._tail_size -= len(self._tail.popleft())

    def output(self) -> Output:
        tail = b"".join(self._tail)
        return Output(bytes(self._head), tail[-self._tail_limit :] if self._tail_limit else b"", self._size)


class Captures:
    """Both streams of one command, and whoever listens to them."""

    def __init__(self, limit: int, on_output: OnOutput | None = None) -> None:
        self.stdout, self.stderr = Capture(limit), Capture(limit)
        self._on_output = on_output

    async def add(self, stream: Stream, chunk: bytes) -> None:
        (self.stdout if stream == "stdout" else self.stderr).add(chunk)
        if self._on_output is not None:
            await self._on_output(stream, chunk)
