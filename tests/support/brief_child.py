"""A child of the supervisor with a very short life, in the standard library alone so that a hundred lives take seconds.

    python -S brief_child.py CONTROL_SOCKET

Says what it was handed; at the next byte it replaces the descriptor `new` by another and kills itself, without waiting
for anything.
"""

import json
import os
import signal
import socket
import sys

names = os.environ.get("LISTEN_FDNAMES", "").split(":")
texts = [os.pread(3 + position, 100, 0).decode() for position in range(int(os.environ.get("LISTEN_FDS", "0")))]
hello = {
    "pid": os.getpid(),
    "listen_pid": os.environ.get("LISTEN_PID"),
    "handed": [{"name": name, "text": text} for name, text in zip(names, texts, strict=False)],
    "open_fds": sorted(map(int, os.listdir("/proc/self/fd"))),
}
control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
control.connect(sys.argv[1])
control.sendall(json.dumps(hello).encode() + b"\n")
control.recv(1)
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.connect(os.environ["NOTIFY_SOCKET"])
notify.send(b"FDSTOREREMOVE=1\nFDNAME=new")
for name, text in [("new", os.getpid())] + ([("kept", number) for number in range(5)] if "kept" not in names else []):
    memory = os.memfd_create(name)
    os.write(memory, str(text).encode())
    socket.send_fds(notify, [f"FDSTORE=1\nFDNAME={name}".encode()], [memory])
os.kill(os.getpid(), signal.SIGKILL)
