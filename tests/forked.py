"""Fresh interpreters in a tenth of their time: forks of a process that has imported PyTorch and done nothing else.

A fork runs code as `python -W error -c` does, with its own environment and folder, up to the interpreter's shutdown.
What PyTorch or Python reads from the environment before that cannot change any more: `serves` says so.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache

import torch

# Its loop ends in a child, which goes on with the code that came; status and seconds of CPU are the answer.
_SERVER = """
def serve(connection):
    import json, os, socket, sys, tempfile, torch, warnings
    while True:
        request, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not request:
            os._exit(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's remark about the threads of BLAS, which knows of forks
            child = os.fork()
        if not child:
            break
        for file in files:
            os.close(file)
        connection.send(json.dumps(child).encode())
        _, status, usage = os.wait4(child, 0)
        connection.send(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]).encode())
    connection.close()
    for target, file in enumerate(files, 1):
        os.dup2(file, target)
        os.close(file)
    code, sys.argv[1:], environment, folder = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    return code
exec(compile(serve(__import__("socket").socket(fileno=int(__import__("sys").argv[1]))), "<string>", "exec"))
"""
_READ_LATE = re.compile("KERNEL_FUSION_.*|CXX|PATH|TMPDIR|TRITON_INTERPRET|PYTEST_CURRENT_TEST|TORCHINDUCTOR_CACHE_DIR")

# Of all forks so far: what they and their children used, which `RUSAGE_CHILDREN` leaves out while the server lives.
seconds = 0.0


@cache
def _server() -> tuple[socket.socket, Mapping[str, str]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-W", "error", "-c", _SERVER, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours, dict(os.environ)


def serves(environment: Mapping[str, str]) -> bool:
    """Whether a fork can have this environment; beside a GPU it had better be a fresh interpreter."""
    if torch.cuda.is_available():
        return False
    there = _server()[1]
    changed = {name for name in {*there, *environment} if there.get(name) != environment.get(name)}
    return all(map(_READ_LATE.fullmatch, changed))


def run(code: str, args: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code in a fork, and wait for its end."""
    global seconds
    connection, _ = _server()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        request = json.dumps([code, args, {**environment}, os.getcwd()]).encode()
        socket.send_fds(connection, [request], [out.fileno(), err.fileno()])
        child = json.loads(connection.recv(100))
        try:
            status, used = json.loads(connection.recv(100))
        except BaseException:
            os.kill(child, signal.SIGKILL)
            connection.recv(100)
            raise
        seconds += used
        texts = [file.seek(0) or file.read() for file in (out, err)]
    return subprocess.CompletedProcess(["-c", *args], status, *texts)
