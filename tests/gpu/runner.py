"""Runs the rows in order, prints the table, and keeps it in RESULTS.md where the device was a real one.

Owns the order of rows, their table, the time that all of them together may take, and one claim of its own: after each
row the device's used memory is what it was before. Makes no context itself, so that it takes nothing of the device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.gpu import filling, lifetimes, outliving, serving, sharing
from tests.gpu.row import Outcome, Row, Setting, run, run_here
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.memory.cuda import devices, driver, nvml

ROWS: tuple[Row, ...] = (*lifetimes.ROWS, *filling.ROWS, *sharing.ROWS, *outliving.ROWS, *serving.ROWS)
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
SETTLES_S = 5.0
"""Until the driver has taken back what a dead process held."""
WITHIN_S = 280.0
"""Five minutes, less what unpacking packages before and removing files after may take."""


def main(arguments: Sequence[str]) -> int:
    """0 when no row failed, 1 when one did, 2 when there is no device to check."""
    parser = argparse.ArgumentParser(prog="python tests/gpu/check.py", description=__doc__)
    parser.add_argument("--device", help="index or UUID, where this process sees several")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="this row only; repeatable")
    parser.add_argument("--folder", help="for files of some GiB (the default is the system's temporary folder)")
    parser.add_argument(
        "--within",
        type=float,
        default=WITHIN_S,
        metavar="S",
        help=f"seconds for all of it; rows that are not done by then have failed (default: {WITHIN_S:.0f})",
    )
    parser.add_argument("--one-row", nargs=2, metavar=("NAME", "SETTING"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one_row:
        name, setting = given.one_row
        return run_here(next(row for row in ROWS if row.name == name), Setting(**json.loads(setting)))
    try:
        device = devices.find(given.device)
        nvml.memory(device.uuid)
    except WeightCacheError as error:
        print(f"there is no device to check: {error}", file=sys.stderr)
        return 2
    chosen = [row for row in ROWS if given.row is None or row.name in given.row]
    started_s = time.monotonic()
    until_s = started_s + given.within
    with (
        tempfile.TemporaryDirectory(prefix="weightcached-gpu-", dir=given.folder) as folder,
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as sockets,
    ):
        several = len(devices.devices()) > 1
        setting = Setting(device.uuid, folder, rehearsal=rehearsed(), alone=several, sockets=sockets)
        outcomes = []
        for row in chosen:
            outcomes.append(_accounted(row, setting, until_s=until_s))
            print(_line(outcomes[-1]), flush=True)
    head = _head(device, setting, time.monotonic() - started_s)
    if not setting.rehearsal:
        before = RESULTS.read_text() if RESULTS.exists() else "# What was seen on GPUs\n"
        RESULTS.write_text(before + _report(head, outcomes))
    print(f"\n{head}" + ("" if setting.rehearsal else f"\nkept in {RESULTS}"))
    return 1 if any(outcome.verdict == "FAIL" for outcome in outcomes) else 0


def rehearsed() -> bool:
    """Whether the driver is the one that is not: without this variable it has no device."""
    return "FAKECUDA" in os.environ


def driver_version() -> str:
    """As ``nvidia-smi`` says it, or why it is unknown."""
    nvml.initialise()
    text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
    result = ctypes.CDLL("libnvidia-ml.so.1").nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    return f"unknown (nvmlReturn {result})" if result else text.value.decode("ascii", "replace")


def _accounted(row: Row, setting: Setting, *, until_s: float) -> Outcome:
    """The row's outcome; a failure where the device's memory is not back to its level afterwards, and where it is too
    late (``until_s``, on the monotonic clock) to try it at all.
    """
    within_s = until_s - time.monotonic()
    if within_s <= 0:
        return Outcome(row.name, row.claim, "FAIL", "not reached: the time for all rows is up (--within, --row)")
    before = nvml.memory(setting.uuid).used_nbytes
    outcome = run(row, setting, within_s=within_s)
    settled_s = min(time.monotonic() + SETTLES_S, until_s)
    while (
        left := nvml.memory(setting.uuid).used_nbytes - before
    ) > setting.spare_nbytes and time.monotonic() < settled_s:
        time.sleep(0.05)  # NVML tells of nothing: it has to be asked
    if left <= setting.spare_nbytes:
        return outcome
    said = f"{left} bytes of the device's memory stay used after the row ended; it said: {outcome.said}"
    return replace(outcome, verdict="FAIL", said=said)


def _line(outcome: Outcome) -> str:
    return f"{outcome.verdict:7}  {outcome.name:12} {outcome.seconds:6.1f} s  {outcome.claim}\n{'':29}{outcome.said}"


def _head(device: devices.Device, setting: Setting, seconds: float) -> str:
    version = driver.call("cuDriverGetVersion", asked="the driver's version")
    date = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    said = "REHEARSED against a fake driver: " if setting.rehearsal else ""
    driver_is = f"driver {driver_version()}, CUDA {version // 1000}.{version % 1000 // 10}"
    return f"{said}{date}, {device.name} ({device.nbytes / 2**30:.0f} GiB), {driver_is}, {seconds:.0f} s in all"


def _report(head: str, outcomes: Sequence[Outcome]) -> str:
    lines = [f"\n## {head}\n", "| verdict | row | claim | figures |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.verdict} | {one.name} | {one.claim} | {one.said.replace('|', '/')} |" for one in outcomes]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
