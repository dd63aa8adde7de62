"""A file system that is far away: a directory's files, read-only, each read answered only after a while (FUSE; root).

``python -m tests.support.distant_files SOURCE POINT LATENCY_S`` serves until it is unmounted. It says ``mounted``, and
in the end how many reads there were, and how many of them were waiting at once. A process of its own: who waits for a
page of such a file may hold the interpreter's lock. Spoken is the kernel's own protocol (linux/fuse.h), version 7.31.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 60.0
_THREADS = 64
_REQUEST_BYTES = 1 << 17
_HEADER = struct.Struct("<IIQQIIIHH")
_ROOT = 1
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _FSYNC = 1, 2, 3, 14, 15, 17, 18, 20
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _DESTROY, _BATCH_FORGET = 25, 26, 27, 28, 29, 36, 38, 42
_SILENT = frozenset({_FORGET, _BATCH_FORGET, _INTERRUPT, _DESTROY})
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22


@dataclass
class Served:
    """``reads`` and ``waiting_max`` are known when the mount has been left."""

    reads: int = 0
    waiting_max: int = 0


@contextmanager
def far_away(source: Path, point: Path, *, latency_s: float) -> Iterator[Served]:
    """``source``'s files at ``point``, a new directory."""
    point.mkdir()
    command = [sys.executable, "-m", "tests.support.distant_files", str(source), str(point), str(latency_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    served = Served()
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "mounted\n"
        try:
            yield served
        finally:
            subprocess.run(["umount", str(point)], check=True)
            served.reads, served.waiting_max = json.loads(process.stdout.readline())
    finally:
        process.stdout.close()
        process.terminate()
        process.wait(TIMEOUT_S)


class _Server:
    def __init__(self, source: Path, fd: int, latency_s: float) -> None:
        self._files = [file for file in sorted(source.iterdir()) if file.is_file()]
        self._fds = [os.open(file, os.O_RDONLY) for file in self._files]
        self._fd = fd
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._waiting = 0
        self.served = Served()

    def run(self) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while True:
            try:
                request = os.read(self._fd, _REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):  # ENOENT: the request was interrupted
                    continue
                return  # ENODEV: unmounted
            _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
            if opcode in _SILENT:
                continue
            answer = self._answer(opcode, node, request[_HEADER.size :])
            number, body = (answer, b"") if isinstance(answer, int) else (0, answer)
            try:
                os.write(self._fd, struct.pack("<IiQ", 16 + len(body), -number, unique) + body)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    return

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        match opcode:
            case _ if opcode == _INIT:
                flags = _ASYNC_READ | _MAX_PAGES
                return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 20, flags, _THREADS, _THREADS, 4096, 1, 256, 0, 0)
            case _ if opcode == _LOOKUP:
                return self._lookup(body.rstrip(b"\0").decode())
            case _ if opcode == _GETATTR:
                return struct.pack("<QII", 3600, 0, 0) + self._attributes(node)
            case _ if opcode in (_OPEN, _OPENDIR):
                return struct.pack("<QII", 0, 0, 0)
            case _ if opcode == _READ:
                return self._read(node, *struct.unpack_from("<QQI", body)[1:])
            case _ if opcode == _READDIR:
                return self._listing() if not struct.unpack_from("<QQ", body)[1] else b""
            case _ if opcode == _STATFS:
                return struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
            case _ if opcode in (_RELEASE, _RELEASEDIR, _FLUSH, _FSYNC):
                return b""
        return errno.ENOSYS

    def _lookup(self, name: str) -> bytes | int:
        for number, file in enumerate(self._files):
            if file.name == name:
                node = _ROOT + 1 + number
                return struct.pack("<QQQQII", node, 0, 3600, 3600, 0, 0) + self._attributes(node)
        return errno.ENOENT

    def _attributes(self, node: int) -> bytes:
        if node == _ROOT:
            size, mode, stamp = 0, 0o040755, 0
        else:
            found = os.fstat(self._fds[node - _ROOT - 1])
            size, mode, stamp = found.st_size, 0o100644, int(found.st_mtime)
        return struct.pack(
            "<QQQQQQIIIIIIIIII", node, size, -(-size // 512), *(stamp,) * 3, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )

    def _read(self, node: int, offset: int, nbytes: int) -> bytes:
        with self._lock:
            self._waiting += 1
            self.served.reads += 1
            self.served.waiting_max = max(self.served.waiting_max, self._waiting)
        time.sleep(self._latency_s)
        with self._lock:
            self._waiting -= 1
        return os.pread(self._fds[node - _ROOT - 1], nbytes, offset)

    def _listing(self) -> bytes:
        entries = b""
        for number, file in enumerate(self._files):
            name = file.name.encode()
            entry = struct.pack("<QQII", _ROOT + 1 + number, number + 1, len(name), 8) + name
            entries += entry + bytes(-len(entry) % 8)
        return entries


def main(source: str, point: str, latency_s: str) -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"distant", point.encode(), b"fuse.distant", 1, options) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), point)
    server = _Server(Path(source), fd, float(latency_s))
    print("mounted", flush=True)
    server.run()
    print(json.dumps([server.served.reads, server.served.waiting_max]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
