"""An environment on a server, with the standard library alone: a lift. `python examples/http_environment.py 9000`, and

[environments.http.lift]
url = "http://127.0.0.1:9000"
public_fields = ["start", "wish"]
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("up", "down")]


def seed(asked):
    task = asked["task"]  # public fields only
    told = f"You are on floor {task['start']}. {task['wish']}"
    state = {"floor": task["start"]}
    return {"messages": [{"role": "user", "content": told}], "tools": TOOLS, "interaction": "tools", "state": state}


def step(asked):
    name, floor = asked["action"].get("name"), asked["state"]["floor"]
    if name not in ("up", "down"):
        return {"state": asked["state"], "observation": "error: there are up and down"}
    floor += 1 if name == "up" else -1
    return {"state": {"floor": floor}, "observation": f"floor {floor}", "reward": 0.0}


def verify(asked):
    return {"reward": 1.0 if asked["state"]["floor"] == asked["task"]["floor"] else 0.0}


def reference(asked):
    task = asked["task"]
    name, count = ("up" if task["floor"] > task["start"] else "down"), abs(task["floor"] - task["start"])
    actions = [{"type": "tool_call", "id": f"r{number}", "name": name} for number in range(count)]
    return {"submission": {"text": "Here we are."}, "actions": actions}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        calls = {"/seed": seed, "/step": step, "/verify": verify, "/reference": reference}
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(calls[self.path](asked) if self.path in calls else {}).encode()
        self.send_response(200 if self.path in calls else 404)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
