"""``weightcached status``: every daemon of a runtime directory, as a table or as JSON. ``seen.py`` collects, this
renders.

Exit codes: 0 all are ready · 1 some are not ready yet · 2 some failed, are stopping, or do not answer · 3 there are
none. A place whose socket file is there but whose daemon is not is shown; a place that was stopped cleanly has no
socket file and is not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from weightcached.daemon.gpus import Gpu, in_words, look_at_gpus
from weightcached.daemon.gpus import as_json as gpus_as_json
from weightcached.daemon.leases import DETACHED_AFTER_S
from weightcached.daemon.seen import Seen, as_json, collect
from weightcached.daemon.states import SERVING, State
from weightcached.daemon.text import binary_size, duration, one_line, table
from weightcached.protocol.command_line import USAGE_EXIT, Parser, positive_seconds
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.messages import GenerationInfo, LeaseInfo, Report
from weightcached.protocol.place_options import NAME_OF_ALL, add_place_arguments, allow_list
from weightcached.protocol.places import runtime_directory
from weightcached.protocol.transaction import Held, Versions, same_on_all

_LEASES_SHOWN = 20
_HEADING = ("PLACE", "STATE", "MODEL", "RANK", "LAYOUT", "PROGRESS", "RESIDENT", "LEASES", "VERSION", "DAEMON")


def exit_code(seen: Sequence[Seen]) -> int:
    """The documented codes; the worst place decides."""
    if not seen:
        return 3
    states = {one.state for one in seen}
    if states <= SERVING:
        return 0
    return 1 if states <= {*SERVING, State.STARTING, State.ADOPTING, State.LOADING} else 2


def render(seen: Sequence[Seen], gpus: Sequence[Gpu] = ()) -> list[str]:
    """The table, and under it what does not fit in a row: leases, why something is wrong, ranks that serve different
    versions, and the memory of the GPUs that the places are on.
    """
    lines = table([_HEADING, *(_row(one) for one in seen)])
    for one in seen:
        lines += _details(one)
    lines += _apart(seen)
    devices = {one.place.device for one in seen}
    lines += [in_words(gpu) for gpu in gpus if gpu.device in devices]
    return [one_line(line) for line in lines]


def _row(one: Seen) -> tuple[str, ...]:
    report = one.report
    if report is None:
        return (str(one.place), one.state, "-", "-", "-", "-", "-", "-", "-", "-")
    return (
        str(one.place),
        report.state,
        report.model,
        _rank(one, report),
        report.layout,
        _progress(report),
        binary_size(report.resident_nbytes),
        str(report.lease_count),
        _short(report.version),
        f"pid {report.pid}, {binary_size(report.own_memory_nbytes)}",
    )


def _rank(one: Seen, report: Report) -> str:
    """``tp0of2-pp1of3``: as the place is called that has its ranks in its name."""
    device = one.place.device
    return device.removeprefix("host-") if device.startswith("host-") else f"tp{report.tp_rank}of{report.tp_size}"


def _progress(report: Report) -> str:
    if report.state not in (State.STARTING, State.ADOPTING, State.LOADING, State.UPDATING):
        return "-"
    if not report.bytes_total:
        return report.stage
    percent = 100 * report.bytes_done / report.bytes_total
    return f"{report.stage} {percent:.0f}% at {binary_size(report.bytes_per_s)}/s"


def _short(version: str | None) -> str:
    """``digest:0123456789ab``: enough to compare two ranks by eye."""
    if version is None:
        return "-"
    kind, _, value = version.partition(":")
    return f"{kind}:{value[:12]}"


def _details(one: Seen) -> list[str]:
    if one.report is None:
        return [f"{one.place}: {one.problem}"]
    report = one.report
    lines = [
        f"lease of pid {lease.pid} (uid {lease.uid}), {duration(lease.age_s)}, {lease.name}{_silence(lease)}"
        for lease in report.leases[:_LEASES_SHOWN]
    ]
    if (more := report.lease_count - len(lines)) > 0:
        lines.append(f"and {more} more leases")
    lines += [_held(one) for one in report.held if one.standing != "current" or one.pinned]
    if report.vault in ("unproven", "dropped"):
        lines.append(f"vault: {report.vault}: {report.vault_reason}")
    if report.unproven_reason is not None:
        lines.append(f"unproven: {report.unproven_reason}")
    if report.quarantined:
        held = f"{', '.join(report.quarantined)}, {binary_size(report.quarantined_nbytes)}"
        lines.append(f"quarantined: {held}; `weightcached release --quarantined` gives it up")
    if report.last_error is not None:
        lines.append(f"last error: {report.last_error}")
    return [f"{one.place}: {line}" for line in lines]


def _apart(seen: Sequence[Seen]) -> list[str]:
    """A line for each name whose ranks serve different versions: for a moment in each change, or until it is mended."""
    serving: dict[str, list[tuple[str, GenerationInfo]]] = {}
    for one in seen:
        if one.report is not None and (word := _rank(one, one.report)) != "tp0of1":
            current = [(word, info) for info in one.report.held if info.standing == "current"]
            serving.setdefault(one.place.name, []).extend(current)
    return [
        f"{name}: its ranks serve different versions: "
        f"{', '.join(f'{word} {_short(one.version)}' for word, one in ranks)}; "
        f"next step: unless a change comes in just now, `weightcached update --align --name {name}`, to any of them"
        for name, ranks in serving.items()
        if not same_on_all([Held(one.generation, Versions(one.version, one.receipts_version)) for _, one in ranks])
    ]


def _held(one: GenerationInfo) -> str:
    """A generation beside the one that the row is about."""
    text = f"{one.standing} generation {one.generation[:12]}, {_short(one.version)}, {binary_size(one.resident_nbytes)}"
    text += f", {one.leases} lease{'' if one.leases == 1 else 's'}"
    if one.pinned:
        text += ", pinned" if one.pinned_for_s is None else f", pinned for {duration(one.pinned_for_s)}"
    return f"{text}, {one.origin if one.origin.startswith('pushed by ') else f'from {one.origin}'}"


def _silence(lease: LeaseInfo) -> str:
    """What is shown of an engine that has missed several signs of life."""
    return f", not heard for {duration(lease.silent_s)}" if lease.silent_s > DETACHED_AFTER_S else ""


def main(argv: list[str]) -> int:
    """Print, and return the exit code."""
    parser = Parser(
        prog="weightcached status",
        description="Show every daemon of a runtime directory.",
        epilog="exit codes: 0 all are ready; 1 some are not ready yet; 2 some failed, are stopping, or do not answer;\n"
        "3 there are none; 64 bad options",
    )
    add_place_arguments(parser, name=NAME_OF_ALL)
    parser.add_argument("--json", action="store_true", help="everything that is known, as one JSON document")
    parser.add_argument(
        "--timeout", type=positive_seconds, default=5.0, metavar="S", help="for each daemon's answer (default: 5)"
    )
    given = parser.parse_args(argv)
    try:
        runtime_dir = runtime_directory(given.runtime_dir)
    except WeightCacheError as error:
        print(f"weightcached status: {error}", file=sys.stderr)
        return USAGE_EXIT
    try:
        seen = collect(runtime_dir, name=given.name, allowed=allow_list(given), timeout_s=given.timeout)
    except WeightCacheError as error:
        print(one_line(f"weightcached status: {error}"), file=sys.stderr)
        return 2
    gpus = look_at_gpus(seen)
    if given.json:
        print(json.dumps(as_json(seen) | gpus_as_json(gpus)))
    elif seen:
        print("\n".join(render(seen, gpus)))
    else:
        print(f"no daemon in {runtime_dir}" + (f" under the name {given.name}" if given.name else ""))
    return exit_code(seen)
