"""`weightcached engine`: the order of a start, the one-shot answer, the life of the server, exit codes.

Owns standard output (the answer and the table, or one JSON line) and the signals. Logs go to standard error.

The weights come first, before seconds of imports: an engine that may not fall back says within a fraction of a second
that its daemon is absent, and one that waits for a loading daemon shows it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from weightcached.client.attach import attach
from weightcached.client.engine import model
from weightcached.client.engine.following import Following
from weightcached.client.engine.options import EngineOptions, parse, serve_command
from weightcached.client.engine.refusal import RequestRefused
from weightcached.client.engine.server import EngineServer
from weightcached.client.engine.service import Service
from weightcached.client.own_loader import attach_or_none
from weightcached.client.owned_daemon import OwnedDaemon
from weightcached.client.stopping import Stopped, raising_stopped
from weightcached.client.timing import Stages, process_age_s
from weightcached.client.transformers.loading import made_by_transformers
from weightcached.client.weights import WeightSet
from weightcached.protocol.command_line import BUG_EXIT, USAGE_EXIT
from weightcached.protocol.config import Parallel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    CheckpointError,
    ConfigurationError,
    ContractError,
    DeploymentError,
    InvalidOption,
    NotReadyError,
    WeightCacheError,
)
from weightcached.protocol.hub import resolve
from weightcached.protocol.memory.chosen import Chosen, chosen
from weightcached.protocol.places import Place, runtime_directory
from weightcached.protocol.ranks import device_of

EXIT_BY_ERROR: tuple[tuple[type[WeightCacheError], int], ...] = (
    (InvalidOption, USAGE_EXIT),
    (ConfigurationError, 2),
    (DeploymentError, 3),
    (NotReadyError, 4),
    (ContractError, 5),
    (CheckpointError, 6),
)
"""The first class that fits decides."""

FINISH_TIMEOUT_S = 30.0
"""How long requests under way may take after SIGTERM."""

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Runs one engine; returns its exit code (`--help` lists them). Uses signals, so only the main thread calls it."""
    stages = Stages(already_s=process_age_s())
    options = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        with raising_stopped(), ExitStack() as resources:
            return _run(options, stages, resources)
    except WeightCacheError as error:
        print(f"weightcached engine: {error.code}: {error}", file=sys.stderr)
        return exit_code(error)
    except RequestRefused as error:  # of --prompt
        print(f"weightcached engine: {error}", file=sys.stderr)
        return USAGE_EXIT
    except Stopped as stopped:  # while starting; while serving it is an ordinary end
        return stopped.exit_status
    except Exception:  # noqa: BLE001  # the exit code says that it is a bug; the log says which
        _log.exception("this is a bug in weightcached: please report it with what stands above")
        return BUG_EXIT


def exit_code(error: WeightCacheError) -> int:
    """The exit code that tells a script what kind of error it was."""
    return next(code for kind, code in EXIT_BY_ERROR if isinstance(error, kind))


def _run(options: EngineOptions, stages: Stages, resources: ExitStack) -> int:
    service = _start(options, stages, resources)
    answer = None if options.prompt is None else _answer(options, service, stages)
    if options.port is None:
        _report(options, service, stages, answer, url=None)
        return 0
    server = EngineServer(service, port=options.port, start_seconds=stages.as_fields())
    try:
        server.start()
        _report(options, service, stages, answer, url=server.url)
        threading.Event().wait()
    except Stopped:
        pass
    _log.info("stopping: requests under way are finished first")
    if not server.stop(timeout_s=FINISH_TIMEOUT_S):
        _log.warning("requests were still under way after %.0f s; they get no answer", FINISH_TIMEOUT_S)
    return 0


def _start(options: EngineOptions, stages: Stages, resources: ExitStack) -> Service:
    """Everything up to a service that can answer. What has to be ended with the engine goes to ``resources``."""
    deadline = Deadline.after(options.timeout_s)
    with stages.stage("find model"):
        model_dir = resolve(options.model)
        home = chosen(options.device, options.memory)
    if options.mode == "daemon":
        with stages.stage("daemon start"):
            daemon = resources.enter_context(OwnedDaemon(_place(options, home), serve_command(options, model_dir)))
            daemon.wait_bound(deadline)
    weights = None
    if options.mode != "off":
        with stages.stage("weights"):
            weights = _attach(options, model_dir, home, deadline)
        if weights is not None:
            resources.callback(weights.close)
    with stages.stage("imports"):
        model.import_transformers()
    with stages.stage("config and tokenizer"):
        config, tokenizer = model.read_config_and_tokenizer(model_dir)
    with stages.stage("imports"):
        recipe = model.Recipe(model_dir, config, tokenizer, model.import_model_class(config))
    with stages.stage("weights" if weights is None else "module and bind"):
        module = model.load(recipe, weights, dtype=options.dtype, device=home.device)
    service = Service(recipe, module, weights, mode=options.mode)
    if options.follow:
        if weights is None or weights.lease is None:
            _log.warning("these weights are not a daemon's: --follow has nothing to follow")
        else:
            service.following = resources.enter_context(Following(weights.follow(), service.switch_to))
    stages.note("weights", _provenance(service))
    return service


def _place(options: EngineOptions, home: Chosen) -> Place:
    whole = Parallel(tp_size=1, tp_rank=0)
    return Place(runtime_directory(options.runtime_dir), options.name, device_of(whole, home.device))


def _attach(options: EngineOptions, model_dir: Path, home: Chosen, deadline: Deadline) -> WeightSet | None:
    """Mapped, or by the contract from disk; ``None`` for those that only Transformers itself can have from there."""
    asked: dict[str, Any] = {
        "mode": "client" if options.mode == "client" else "require",
        "dtype": options.dtype,
        "device": home.option,
        "memory": home.memory,
        "name": options.name,
        "runtime_dir": options.runtime_dir,
        "digest": options.digest,
        "timeout_s": deadline.remaining_s(),
        "wait_for_daemon_s": options.wait_for_daemon_s,
        "engine_name": "weightcached-engine",
        "on_stale": options.on_stale,
        "want": "current" if options.follow else "checkpoint",
        "allow_uids": options.allow_uids,
    }
    if options.layout == "hf":
        return attach(model_dir, **asked)
    made = made_by_transformers(model_dir, dtype=options.dtype, device=home.device)
    return attach_or_none(model_dir, **asked, **made)


def _provenance(service: Service) -> str:
    """Words for the table: where the weights came from."""
    fields = service.weights_fields()
    if fields["source"] == "transformers":
        return "from disk, by Transformers, which also built the module"
    size = f"{fields['resident_bytes'] / 1e9:.3f} GB"
    if fields["source"] == "disk":
        return f"from disk: no daemon ({size})"
    return f"from the daemon ({size}, generation {fields['generation']})"


def _answer(options: EngineOptions, service: Service, stages: Stages) -> dict[str, Any]:
    """The answer to ``--prompt``: the fields of a generation, or one embedding. The total ends with its first part."""
    prompt, began = options.prompt or "", time.monotonic()
    if service.kind == "encoder":
        with stages.stage("first embedding"):
            return {"embedding": service.embed([prompt])[0]}
    answer = service.generate(prompt, max_new_tokens=options.max_new_tokens)
    stages.record("first token", began_at_s=began, ended_at_s=began + answer.first_token_s)
    stages.note("total", f"to the first of {len(answer.token_ids)} tokens; all in {answer.seconds:.3f} s")
    return dataclasses.asdict(answer)


def _answer_text(answer: dict[str, Any], *, token_ids: bool) -> str:
    if "embedding" in answer:
        shown = ", ".join(f"{value:.6f}" for value in answer["embedding"][:8])
        return f"[{shown}, …]  ({len(answer['embedding'])} numbers)"
    ids = f"\n{list(answer['token_ids'])}" if token_ids else ""
    return f"{answer['text']}{ids}"


def _report(
    options: EngineOptions, service: Service, stages: Stages, answer: dict[str, Any] | None, *, url: str | None
) -> None:
    """The one time this process writes to standard output: when it is ready to serve, or done."""
    if options.json:
        line = {"url": url, "answer": answer, "seconds": stages.as_fields(), "weights": service.weights_fields()}
        print(json.dumps(line), flush=True)
        return
    if answer is not None:
        print(_answer_text(answer, token_ids=options.token_ids), end="\n\n")
    print(stages.table())
    if url is not None:
        print(f"\nserving on {url}  (POST {'/generate' if service.kind == 'decoder' else '/embed'}, GET /status)")
    sys.stdout.flush()
