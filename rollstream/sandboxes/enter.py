"""Runs commands inside bubblewrap boxes, each in a process that it forks: `python -I -S enter.py`, asked by `door.py`.

A program of its own, because a process that enters namespaces cannot leave them; it imports nothing of ours, since it is
forked for every command. A child reads what it is to do, never the process that others are forked from: what one box is
told does not stand in the memory of what enters another.

bubblewrap makes a box's namespaces in one user namespace and the box's processes live in another below it. So the order
is: join the control groups and drop root, the outer user namespace (which gives rights over the others), the
others, the inner one, give up all rights.
"""

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import warnings  # noqa: F401 (what `os.execvpe` imports, and could not find inside)

CLONE_NEWUSER = 0x10000000
OTHERS = {"cgroup": 0x02000000, "ipc": 0x08000000, "uts": 0x04000000, "net": 0x40000000, "pid": 0x20000000, "mnt": 0x00020000}
NS_GET_PARENT = 0xB702
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
MOST_REQUEST = 192 * 1024
"""Bytes of one request."""
NOT_FOUND, NOT_RUNNABLE, BOX_GONE = 127, 126, 125

libc = ctypes.CDLL(None, use_errno=True)


def call(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(pid: int, uid: int) -> None:
    """Become a process of the box; only children of this one are in its pid namespace."""
    folder = f"/proc/{pid}/ns"
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    inner = os.open(f"{folder}/user", os.O_RDONLY)
    others = {name: os.open(f"{folder}/{name}", os.O_RDONLY) for name in OTHERS}
    call(libc.setns(fcntl.ioctl(inner, NS_GET_PARENT), CLONE_NEWUSER))
    same_net = os.fstat(others["net"]).st_ino == os.stat("/proc/self/ns/net").st_ino
    for name, flag in OTHERS.items():
        if not (name == "net" and same_net):
            call(libc.setns(others[name], flag))
    call(libc.setns(inner, CLONE_NEWUSER))
    call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def serve(requests: socket.socket) -> None:
    """Fork a child for every request, until nobody can send any."""
    # Children that have told how their command ended are waited for by nobody.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        select.select([requests], [], [])
        taken, tells = os.pipe()
        if os.fork() == 0:
            os.close(taken)
            answer(requests, tells)
        os.close(tells)
        over = os.read(taken, 1) == b"-"
        os.close(taken)
        if over:
            return


def answer(requests: socket.socket, tells: int) -> None:
    """Take one request, run its command and write how it ended. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raw, fds, _, _ = socket.recv_fds(requests, MOST_REQUEST, 4)
    os.write(tells, b"+" if raw else b"-")
    os.close(tells)
    if not raw:
        os._exit(0)
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
        os.close(fd)
    status = fds[3]
    request = json.loads(raw)
    # Where the request came from is dup2's target 0, or closed with this process.
    code = run(request["pid"], request["uid"], request["groups"], request["cwd"], request["argv"], request["env"], status)
    os.write(status, str(code).encode())
    os._exit(0)


def run(pid: int, uid: int, groups: list[str], cwd: str, argv: list[str], env: dict[str, str], status: int) -> int:
    """Run a command in a box to its end; 128 + the signal that killed it."""
    try:
        for path in groups:
            with open(path, "w") as procs:
                procs.write("0")
        enter(pid, uid)
        child = os.fork()
    except OSError as error:
        os.write(2, f"cannot enter the sandbox: {error}\n".encode())
        return BOX_GONE
    if child == 0:
        os.close(status)
        execute(cwd, argv, env)
    # The command's end closes its streams, and not ours.
    for fd in range(3):
        os.close(fd)
    _, ended = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(ended)
    return 128 - code if code < 0 else code


def execute(cwd: str, argv: list[str], env: dict[str, str]) -> None:
    """Become the command. Never returns."""
    what = cwd
    try:
        os.setsid()
        os.chdir(cwd)
        what = argv[0]
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"{what}: {error.strerror}\n".encode(errors="replace"))
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE)


if __name__ == "__main__":
    serve(socket.socket(fileno=0))
    os._exit(0)
