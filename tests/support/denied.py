"""System calls that the kernel refuses this process from now on, by their arguments: a filter of seccomp, as containers
have them. For forked children only: a filter cannot be taken away again.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from dataclasses import dataclass

MREMAP = {"x86_64": 25, "aarch64": 216}.get(platform.machine())
"""Its number; None where this module does not know it."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: of a word, a constant
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARGUMENTS = 0, 16


@dataclass(frozen=True)
class Denied:
    """A call with this number whose argument ``position`` has the low 32 bits of ``value`` fails with ENOMEM."""

    number: int
    position: int
    value: int


def deny(*rules: Denied) -> None:
    """From now on these calls fail in this thread, and in those that it starts."""
    program: list[tuple[int, int, int, int]] = []
    for rule in rules:
        program += [
            (_LOAD, 0, 0, _NUMBER),
            (_JUMP_IF_EQUAL, 0, 3, rule.number),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * rule.position),
            (_JUMP_IF_EQUAL, 0, 1, rule.value & 0xFFFF_FFFF),
            (_RETURN, 0, 0, _FAIL | errno.ENOMEM),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0) == 0, ctypes.get_errno()
