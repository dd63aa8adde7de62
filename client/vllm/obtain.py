"""This rank's weights: from its daemon, or the finding that none are cached here.

Owns how the loader's options become an attach, and the daemon that a worker owns in mode ``daemon``. Where the place is
absent it says so (DaemonAbsent), whatever the mode: whether vLLM's own loader may be used is for all ranks to decide.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcached.client.attach import attach
from weightcached.client.owned_daemon import OwnedDaemon
from weightcached.client.vllm.options import LoaderOptions
from weightcached.client.weights import WeightSet
from weightcached.protocol.config import Parallel, read_model_config
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.memory.chosen import HOST, Chosen
from weightcached.protocol.places import Place, runtime_directory
from weightcached.protocol.ranks import device_of, ranks_of

if TYPE_CHECKING:
    import torch

_OWNED: dict[Place, OwnedDaemon] = {}
"""Daemons of this process. vLLM makes a loader anew for each question it has; what a loader has started outlives it."""


@dataclass(frozen=True)
class Wish:
    """What one worker wants: a model as vLLM computes with it, and which rank of it."""

    options: LoaderOptions
    name: str
    model_dir: Path
    parallel: Parallel
    dtype: str
    """As the daemon was told."""
    engine: EngineKey | None = None
    """Of layout ``vllm``."""
    home: Chosen = HOST
    """The memory that the worker computes with."""

    @property
    def place(self) -> Place:
        return Place(runtime_directory(self.options.runtime_dir), self.name, device_of(self.parallel, self.home.device))

    @property
    def shard(self) -> dict[str, Any]:
        """Layout, dtype, quantization, sizes, ranks and placement: keywords of ``attach``, options of ``serve``."""
        sizes = {f"{kind}_size": getattr(self.parallel, f"{kind}_size") for kind in ("tp", "pp", "ep")}
        return {
            "layout": self.options.layout,
            "dtype": self.dtype,
            "quantization": self.options.quantization,
            **sizes,
            **ranks_of(self.parallel),
            "expert_placement": self.parallel.expert_placement,
        }


def dtype_to_ask_for(options: LoaderOptions, model_dir: Path, computed: torch.dtype) -> str:
    """The dtype that the daemon has to have been told, when vLLM computes in ``computed``.

    A layout of vLLM's own is in what vLLM computes in: its key says which. For layout ``fused`` the daemon casts: vLLM
    runs a float32 checkpoint in bfloat16 unless told otherwise, and a daemon that was told ``auto`` keeps what is on
    disk, so ``auto`` is asked for only where both are the same.
    """
    if options.dtype != "engine":
        return options.dtype
    if options.layout == "vllm":
        return "auto"
    config = read_model_config(model_dir)
    stored = config.get("dtype", config.get("torch_dtype"))
    wanted = str(computed).removeprefix("torch.")
    return "auto" if stored == wanted else wanted


def weights_for(wish: Wish, *, want: str | None = None) -> WeightSet:
    """The mapped weights; ``want`` instead of what the options say. In mode ``daemon`` the daemon is started first.
    Raises the errors of ``attach``.
    """
    options = wish.options
    deadline = Deadline.after(options.timeout_s)
    if options.weight_cache_mode == "daemon":
        _own_daemon(wish, deadline)
    return attach(
        wish.model_dir,
        device=wish.home.option,
        memory=wish.home.memory,
        mode="require",  # in mode `client` absence is answered with vLLM's own loader, not with ours
        name=wish.name,
        runtime_dir=options.runtime_dir,
        want=options.want if want is None else want,
        digest=options.digest,
        timeout_s=deadline.remaining_s(),
        wait_for_daemon_s=options.wait_for_daemon_s,
        cache_dir=options.cache_dir,
        allow_uids=options.allow_uids,
        allow_gids=options.allow_gids,
        trusted_filesystems=options.trusted_filesystems,
        engine_name="vllm",
        heartbeat_s=options.heartbeat_s,
        on_stale=options.on_stale,
        engine=wish.engine,
        **wish.shard,
    )


def _own_daemon(wish: Wish, deadline: Deadline) -> None:
    place = wish.place
    if place in _OWNED:
        return
    daemon = OwnedDaemon(place, serve_words(wish))
    try:
        daemon.wait_bound(deadline)
    except BaseException:
        daemon.stop()
        raise
    _OWNED[place] = daemon
    atexit.register(daemon.stop)


def serve_words(wish: Wish) -> Sequence[str]:
    """Arguments of `weightcached` for the daemon that serves exactly what :func:`weights_for` asks for."""
    options = wish.options
    words = ["serve", "--model", str(wish.model_dir), "--name", wish.name]
    for word, value in (*wish.shard.items(), ("runtime_dir", options.runtime_dir), ("cache_dir", options.cache_dir)):
        if value is not None:
            words += [f"--{word.replace('_', '-')}", str(value)]
    if wish.home != HOST:
        words += ["--device", wish.home.option, "--memory", wish.home.memory]
    for filesystem in options.trusted_filesystems:
        words += ["--trust-filesystem", filesystem]
    return words
