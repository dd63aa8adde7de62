"""Which processes NVML lists as having a context, where its list can be relied on.

Owns the positive control: in a container NVML may name nobody, or by the pids of another namespace, and then somebody's
absence from the list says nothing.
"""

from __future__ import annotations

from tests.gpu.row import Setting, child, line_of, require
from weightcached.protocol.memory.cuda import nvml


def without_context(setting: Setting, pid: int, *, who: str) -> str:
    """That ``pid`` has no context on the device, in words; AssertionError where NVML lists it. A process that surely
    has one is looked for beside it: where NVML does not list that one either, the words say that only the memory in
    use speaks.
    """
    before = _listed(setting)
    with child("tests.gpu.peer", "context", setting.uuid, "0") as control:
        line_of(control)
        now = _listed(setting)
    if control.pid not in now - before:
        return "NVML does not list even a process that has a context: only the memory in use says that there is none"
    require(pid not in now, f"{who} has a context: NVML lists it")
    return f"no context: NVML lists a process that has one, and not {who}"


def _listed(setting: Setting) -> set[int]:
    return {holder.pid for holder in nvml.holders(setting.uuid)}
