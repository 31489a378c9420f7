"""A Python that has imported torch: ``python -m ...`` as a fork of it takes a tenth of the time.

``python warm_python.py serve SOCKET`` waits for commands, and ``python warm_python.py run SOCKET
[-I] -m MODULE ...`` has one run there, with its own folder, variables, input and output.
"""

import json
import os
import runpy
import select
import signal
import socket
import sys

MOST_BYTES = 1 << 20


def serve(path: str) -> None:
    """Fork for each command that comes to the socket at `path`, until standard input ends."""
    import hypothesis  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401

    import pytest_modelhealth.commands.diff
    import pytest_modelhealth.inspector
    import pytest_modelhealth.runs.difference.comparing
    import pytest_modelhealth.runs.page  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what has ended
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            if os.fork() == 0:
                server.close()
                answer(client)
            client.close()


def answer(client: socket.socket) -> None:
    """Run the command of `client`, tell it the exit status, and end this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, _, _ = socket.recv_fds(client, MOST_BYTES, 3)
    arguments, folder, variables = json.loads(data)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[0:1] = [] if arguments[0] == "-I" else [folder]
    arguments = arguments[arguments.index("-m") + 1 :]
    sys.argv[:] = arguments
    status = 0
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    client.sendall(str(int(status)).encode())
    os._exit(0)


def run(path: str, arguments: list[str]) -> int:
    """Have a command run, and return its exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        told = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()  # noqa: PTH109
        assert len(told) < MOST_BYTES
        socket.send_fds(server, [told], [0, 1, 2])
        return int(server.recv(16) or 70)  # nothing: it was killed


if __name__ == "__main__":
    command, at, *rest = sys.argv[1:]
    if command == "serve":
        serve(at)
        os._exit(0)  # taking torch down takes seconds
    sys.exit(run(at, rest))
