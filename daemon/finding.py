"""What is to be loaded: which directory, which config, and with what. Reads no weight.

Owns turning options and a checkpoint's place into a :class:`LoadRequest`, for the first load as for every change; the
key of the engine that makes the layout is asked for here. Where weights are kept already, the config that is asked for
is read here too, to be compared.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from weightcached.daemon.adoption import Whole
from weightcached.daemon.children import Child, parent_arguments
from weightcached.daemon.digesting import remembered
from weightcached.daemon.engine_keys import ask_for_key, inputs_of
from weightcached.daemon.generation import Origin
from weightcached.daemon.loading import LoadRequest
from weightcached.daemon.patience import in_thread
from weightcached.daemon.record import Record
from weightcached.protocol.config import CacheConfig, build_config, provenance_of
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.errors import ContractError

HUB_MODULE = "weightcached.protocol.hub"
CONFIG_TIMEOUT_S = 1.0
"""For reading ``config.json`` of weights that are here already: longer than that, and it counts as unreadable."""


class Finding:
    """For one daemon, whose memory kind is known by the time that a config is wanted."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._options = record.options

    async def origin(self) -> Origin:
        """Of what ``--model`` says: the checkpoint's directory. A hub id is resolved in a process of its own, so that
        its libraries stay out of here.
        """
        model = self._options.model
        if await in_thread(Path(model).is_dir):
            return Origin.of(model)
        child = await Child.start("hub", HUB_MODULE, [*parent_arguments(), "--", model], answers=True)
        try:
            answer = await child.answer()
        finally:
            await child.end()
        if not isinstance(answer.get("path"), str):
            raise ContractError("the hub process answered without a path", found=sorted(answer))
        return Origin.of(answer["path"], hub_id=model)

    async def engine_key(self, model_dir: Path, kept: Whole | None = None) -> EngineKey | None:
        """Of the engine whose layout is asked for; the one of what is ``kept``, where nothing has changed since that
        could change it.
        """
        options = self._options
        if options.engine is None:
            return None
        if kept is not None and kept.record is not None and kept.record.engine_inputs is not None:
            async with asyncio.timeout(CONFIG_TIMEOUT_S):
                inputs = await in_thread(lambda: inputs_of(options, model_dir))
            if inputs == kept.record.engine_inputs and kept.config.layout == options.engine:
                return EngineKey.of(options.engine, kept.config.layout_revision, kept.config.engine or {})
        self._record.progress.update(f"ask engine {options.engine} for its key"[:200])
        return await ask_for_key(options.engine, options, model_dir)

    async def config(self, model_dir: Path, engine: EngineKey | None) -> CacheConfig:
        """What the options ask for, of the checkpoint in that directory."""
        options, memory = self._options, self._record.known_memory
        return await in_thread(
            lambda: build_config(
                model_dir,
                layout=options.layout,
                dtype=options.dtype,
                quantization=options.quantization,
                engine=engine,
                memory=memory,
                device=options.device,
                **options.parallel.model_dump(),
            )
        )

    async def request(self, origin: Origin, *, snapshot: Path | None = None) -> LoadRequest:
        """All that a load of that checkpoint needs to know; ``snapshot`` as in :class:`LoadRequest`."""
        options = self._options
        model_dir = Path(origin.model_dir)
        inputs = None if options.engine is None else await in_thread(lambda: inputs_of(options, model_dir))
        config = await self.config(model_dir, await self.engine_key(model_dir))
        return LoadRequest(
            origin=origin,
            config=config,
            provenance=await in_thread(lambda: provenance_of(model_dir)),
            trusted_filesystems=options.trusted_filesystems,
            known_digest=lambda receipts: remembered(receipts, options.cache_dir),
            snapshot=snapshot,
            strategy=options.load_strategy,
            engine_arguments=options.engine_arguments,
            engine_inputs=inputs,
        )
