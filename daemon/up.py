"""``weightcached up``: all ranks of a model on this host, in the foreground. Starts one ``serve`` per rank and owns
them all. Each is under a supervisor, which starts it again when it dies and keeps its weights meanwhile.

Signals go to every rank. When a rank ends for good that was not told to, the others are stopped and the exit status is
not 0. Ranks die with this process, even if it is killed, and their weights with them. Their logs come through here:
lines of text get the rank in front, JSON carries it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

import uvloop

from weightcached.daemon.address import Address
from weightcached.daemon.options import add_model_arguments, add_running_arguments, metrics_address, serve_options
from weightcached.protocol.command_line import USAGE_EXIT, Parser
from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.named_places import require_apart
from weightcached.protocol.place_options import NAME_OF_ONE, add_place_arguments
from weightcached.protocol.places import Place
from weightcached.protocol.processes import python_command
from weightcached.protocol.ranks import every_rank, ranks_of
from weightcached.protocol.shard_options import device_of_rank, parse_with_engine, sizes

_LINE_MAX_BYTES = 1024 * 1024


def main(argv: list[str]) -> int:
    """Run all ranks until a signal; 0 when every rank then stopped cleanly, 1 otherwise."""
    parser = Parser(
        prog="weightcached up",
        description="Serve all ranks of a model on this host, in the foreground, until SIGTERM or Ctrl-C. Each is\n"
        "supervised: one that dies is started again, with its weights. Takes the options of `weightcached serve`, but\n"
        "the ranks. They are numbered: stage by stage, and in each the tensor-parallel or expert-parallel ranks.\n"
        "With --device cuda rank N has the visible GPU with index N.\n"
        "Rank N serves metrics at the port of --metrics-address plus N.",
        epilog="exit codes: 0 all ranks stopped by a signal to this command; 1 a rank ended otherwise (by\n"
        "`release`, too) or badly, which stops the others; 64 bad options",
    )
    add_model_arguments(parser)
    add_place_arguments(parser, name=NAME_OF_ONE)
    add_running_arguments(parser)
    given = parse_with_engine(parser, argv)
    try:
        parallels = every_rank(sizes(given), placement=given.expert_placement)
        check(given, parallels)
    except WeightCacheError as error:
        print(f"weightcached up: {error}", file=sys.stderr)
        return USAGE_EXIT
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ranks = Ranks(
            argv[: argv.index("--")] if "--" in argv else argv,
            engine_arguments=given.engine_arguments,
            parallels=parallels,
            device=given.device,
            metrics=metrics_address(given),
            log_format=given.log_format,
            log_level=given.log_level,
        )
        return runner.run(ranks.run())


def check(given: argparse.Namespace, parallels: Sequence[Parallel]) -> None:
    """Whether every rank's options can be used: found out once, here, and not once per rank."""
    places: dict[int, Place] = {}
    for rank, parallel in enumerate(parallels):
        stated = {**vars(given), **ranks_of(parallel), "device": device_of_rank(given.device, rank, len(parallels))}
        options = serve_options(argparse.Namespace(**stated, parent_pid=None))
        if options.metrics_address is not None:
            options.metrics_address.shifted(rank)
        places[rank] = options.place
    require_apart(places)


class Ranks:
    """The ranks' processes, from start to end."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        engine_arguments: Sequence[str],
        parallels: Sequence[Parallel],
        device: str,
        metrics: Address | None,
        log_format: str,
        log_level: str,
    ) -> None:
        self._arguments = arguments
        self._engine_arguments = ("--", *engine_arguments) if engine_arguments else ()
        self._log_arguments = ("--log-format", log_format, "--log-level", log_level)
        self._parallels = parallels
        self._device = device
        self._metrics = metrics
        self._prefix = log_format == "text"
        self._processes: dict[int, Process] = {}
        self._told = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._tell, number)
        watching = []
        for rank in range(len(self._parallels)):
            if self._told:
                break
            self._processes[rank] = await self._start(rank)
            watching.append(asyncio.create_task(self._watch(rank), name=f"rank {rank}"))
        clean = await asyncio.gather(*watching)
        return 0 if all(clean) else 1

    async def _start(self, rank: int) -> Process:
        metrics = () if self._metrics is None else ("--metrics-address", str(self._metrics.shifted(rank)))
        ranks = [
            word
            for name, number in ranks_of(self._parallels[rank]).items()
            for word in (f"--{name.replace('_', '-')}", str(number))
        ]
        device = ("--device", device_of_rank(self._device, rank, len(self._parallels)))
        # A session of its own: Ctrl-C on the terminal must reach a rank once, through us.
        return await asyncio.create_subprocess_exec(
            *python_command("weightcached.daemon", "supervise", "--parent-pid", str(os.getpid()), *self._log_arguments),
            *("--", "serve", *self._arguments, *metrics, *ranks, *device, *self._engine_arguments),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            limit=_LINE_MAX_BYTES,
            start_new_session=True,
        )

    async def _watch(self, rank: int) -> bool:
        """Pass on what the rank logs until it ends; whether it ended as it was told."""
        process = self._processes[rank]
        copying = asyncio.create_task(self._copy_log(rank), name=f"log of rank {rank}")
        status = await process.wait()
        told = self._told
        await copying
        if not told:
            print(f"weightcached up: rank {rank} ended with status {status}: stopping all", file=sys.stderr, flush=True)
            self._tell(signal.SIGTERM)
        return told and status == 0

    async def _copy_log(self, rank: int) -> None:
        stream = self._processes[rank].stderr
        prefix = f"[rank {rank}] " if self._prefix else ""
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:
                line = b"(a line that is too long to show)\n"
            if not line:
                return
            print(prefix + line.decode("utf-8", "replace"), end="", file=sys.stderr, flush=True)

    def _tell(self, number: int) -> None:
        """Send a signal to every rank that still runs. A second one makes them hurry."""
        self._told = True
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)
