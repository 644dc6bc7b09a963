"""The example of an environment on a server, running in a thread of this process."""

import runpy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "http_environment.py"


@contextmanager
def example_server() -> Iterator[str]:
    """Its address, for as long as it runs."""
    handler = runpy.run_path(str(EXAMPLE), run_name="example")["Handler"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
