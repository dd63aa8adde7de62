"""Everything a process might try to change memory that it was only lent: by name, so that a test can say what must be
refused. Nothing here is expected to succeed, or where it does, to be seen by anybody else.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from weightcached.protocol.fds import OwnedFds

Attempt = Callable[[], object]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_PIECE = b"\xa5" * 16
_FALLOCATE = {"allocate": 0x0, "punch a hole": 0x3, "collapse": 0x8, "zero": 0x10, "insert": 0x20, "unshare": 0x41}
_MADVICE = {"MADV_REMOVE": 9, "MADV_FREE": 8, "MADV_DONTNEED": 4, "MADV_WIPEONFORK": 18}


def vandalise(fd: int, *, nbytes: int) -> dict[str, str]:
    """Try it all on a received descriptor of ``nbytes`` bytes. What was tried → the error's name, or "done"."""
    outcomes: dict[str, str] = {}
    with OwnedFds() as opened:
        for how, flags in (("as lent", None), ("read-write", os.O_RDWR), ("write-only", os.O_WRONLY)):
            target = fd
            if flags is not None:
                outcome = outcomes[f"reopen {how}"] = _outcome(partial(_reopen, fd, flags, opened))
                if outcome != "done":
                    continue
                target = opened[len(opened) - 1]
            for name, attempt in _attempts(target, fd, nbytes):
                outcomes[f"{how}: {name}"] = _outcome(attempt)
        outcomes["reopen truncating"] = _outcome(partial(_reopen, fd, os.O_RDWR | os.O_TRUNC, opened))
        outcomes["reopen appending"] = _outcome(partial(_reopen, fd, os.O_WRONLY | os.O_APPEND, opened))
    return outcomes


def reopen_through(pid: int, memfd_name: str) -> Iterator[int]:
    """Descriptors, opened for writing, of memfds of that name that process ``pid`` holds. Raises PermissionError."""
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{memfd_name}"):
                yield os.open(f"{folder}/{number}", os.O_RDWR | os.O_CLOEXEC)


def _reopen(fd: int, flags: int, opened: OwnedFds) -> None:
    opened.append(os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC))


def _outcome(attempt: Attempt) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"


def _attempts(fd: int, lent: int, nbytes: int) -> Iterator[tuple[str, Attempt]]:
    yield "write", lambda: os.write(fd, _PIECE)
    yield "pwrite", lambda: os.pwrite(fd, _PIECE, 0)
    yield "pwritev", lambda: os.pwritev(fd, [_PIECE], nbytes // 2)
    yield "append", lambda: os.pwrite(fd, _PIECE, nbytes)
    yield "shrink", lambda: os.ftruncate(fd, 0)
    yield "grow", lambda: os.ftruncate(fd, nbytes + 4096)
    for name, mode in _FALLOCATE.items():
        yield name, partial(_fallocate, fd, mode, nbytes)
    yield "sendfile", lambda: os.sendfile(fd, _source(), 0, 16)
    yield "copy_file_range", lambda: os.copy_file_range(_source(), fd, 16, 0, 0)
    yield "splice", lambda: _splice_into(fd)
    yield "splice out, write on", lambda: _dirty_pipe(fd)
    yield "add a seal", lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    yield "map for writing", lambda: _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
    yield "map, then allow writing", lambda: _with_mapping(fd, nbytes, _make_writable)
    yield "/proc/self/mem", lambda: _with_mapping(fd, nbytes, _write_through_proc)
    yield "process_vm_writev", lambda: _with_mapping(fd, nbytes, _write_through_the_kernel)
    for name, advice in _MADVICE.items():
        yield name, partial(_with_mapping, fd, nbytes, partial(_madvise, advice))
    yield "private write", lambda: _private_write(lent, nbytes)


def _source() -> int:
    """Something to copy from; closed with the process."""
    fd = os.memfd_create("source")
    os.write(fd, _PIECE)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _fallocate(fd: int, mode: int, nbytes: int) -> None:
    size = ctypes.c_longlong(max(4096, nbytes // 4096 * 4096) if mode else nbytes + 4096)
    _check(_libc.fallocate(fd, mode, ctypes.c_longlong(0), size))


def _splice_into(fd: int) -> None:
    with OwnedFds(os.pipe()) as pipe:
        os.write(pipe[1], _PIECE)
        os.splice(pipe[0], fd, 16, offset_dst=0)


def _dirty_pipe(fd: int) -> None:
    """CVE-2022-0847: a page lent to a pipe must not take what is written into the pipe afterwards."""
    with OwnedFds(os.pipe()) as pipe:
        for _ in range(16):  # let every slot of the pipe have been one that writes may be merged into
            os.write(pipe[1], b"x" * 4096)
            os.read(pipe[0], 4096)
        os.splice(fd, pipe[1], 1, offset_src=0)
        os.write(pipe[1], _PIECE)


def _map(fd: int, nbytes: int, protection: int, flags: int = mmap.MAP_SHARED) -> int:
    address = _libc.mmap(None, nbytes, protection, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        _check(-1)
    return int(address)


def _with_mapping(fd: int, nbytes: int, work: Callable[[int, int], None]) -> None:
    """A shared mapping that may be read, and what is made of it. Left mapped: the process ends soon."""
    work(_map(fd, nbytes, mmap.PROT_READ), nbytes)


def _make_writable(address: int, nbytes: int) -> None:
    _check(_libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE))


def _write_through_proc(address: int, nbytes: int) -> None:
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), _PIECE, address)


def _write_through_the_kernel(address: int, nbytes: int) -> None:
    source = ctypes.create_string_buffer(_PIECE)
    here = (ctypes.c_uint64 * 2)(ctypes.addressof(source), len(_PIECE))
    there = (ctypes.c_uint64 * 2)(address, len(_PIECE))
    written = _libc.process_vm_writev(os.getpid(), here, 1, there, 1, 0)
    _check(written)


def _madvise(advice: int, address: int, nbytes: int) -> None:
    _check(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice))


def _private_write(fd: int, nbytes: int) -> None:
    """What engines do: it succeeds, and stays theirs."""
    address = _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
    ctypes.memmove(address, _PIECE, len(_PIECE))
    _check(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADVICE["MADV_DONTNEED"]))
    ctypes.memset(address, 0xA5, nbytes)
