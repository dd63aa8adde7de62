"""Every error weightcached raises, in one tree split by what the caller should do.

    WeightCacheError
    ├── NotReadyError                 wait, or allow more time
    │   └── DaemonNotReady · UpdateConflict · DecisionUnknown · ReadersInside
    ├── DeploymentError               fix how things are deployed
    │   ├── DaemonAbsent · DaemonUnreachable · DaemonFailed · DaemonDraining
    │   ├── UntrustedDaemon · UntrustedClient · InvalidPlace · PlaceTaken
    │   ├── InsufficientMemory · WorkerDied · HolderDied · EngineFailed
    │   ├── DeviceAbsent · DeviceFailed
    │   ├── ManagerUnreachable · InvalidEnvironment
    │   ├── GenerationGone · SnapshotUnwritable · RanksDisagree · SwapFailed
    │   └── StageLost
    ├── ConfigurationError            fix what was asked for
    │   ├── CacheConfigMismatch · CheckpointMismatch · CheckpointUnproven
    │   └── UnsupportedModel · InvalidOption · SnapshotMismatch · SwapRefused · PushMismatch
    ├── CheckpointError               fix the checkpoint's files
    │   ├── HeaderError · IndexFileError · ModelConfigError · MissingShard · TruncatedFile
    │   ├── DuplicateTensor · OverlappingTensors · UnknownDtype · PickleRefused
    │   ├── MissingTensor · UnexpectedTensor · ShapeMismatch · CheckpointChanged
    │   └── UnusableValue · SnapshotUnusable
    └── ContractError                 report a bug (or a hostile peer)
        ├── ProtocolError · TransferError · InternalError
        └── PlanError · BindError · BarrierError

Each class carries ``code``, the word that stands for it on the wire, in logs and in metrics. Raising any of them
changes nothing that is cached: after an error the caller holds no descriptor, mapping or lease that it did not hold
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from weightcached.protocol.text import one_line


class WeightCacheError(Exception):
    """Root of the tree. ``expected``, ``found``, ``where`` and ``next_step`` are kept apart, for tools to show.

    In words it is one line without control characters, whatever a peer or a file has put into it.
    """

    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        expected: object = None,
        found: object = None,
        where: object = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.found = found
        self.where = where
        self.next_step = next_step

    def __str__(self) -> str:
        parts = [self.message]
        for label, value in (("expected", self.expected), ("found", self.found), ("where", self.where)):
            if value is not None:
                parts.append(f"{label}: {value}")
        if self.next_step:
            parts.append(f"next step: {self.next_step}")
        return one_line("; ".join(parts))

    def as_fields(self) -> dict[str, str | None]:
        """The code and the parts of the message in words, as JSON and frames carry them."""
        parts = {"expected": self.expected, "found": self.found, "where": self.where, "next_step": self.next_step}
        return {
            "code": self.code,
            "message": self.message,
            **{label: None if value is None else str(value) for label, value in parts.items()},
        }


class NotReadyError(WeightCacheError):
    """The weights are on their way. Nothing is wrong yet; the deadline was too short for this load."""

    code = "not_ready"


class DaemonNotReady(NotReadyError):
    """The daemon lives but had not published (or could not take the connection) before the deadline."""

    code = "daemon_not_ready"


class UpdateConflict(NotReadyError):
    """Another change of this group's weights is in the way, or was decided first. What is served has not changed."""

    code = "update_conflict"


class ReadersInside(NotReadyError):
    """Somebody still computed with the weights when the time to stop them was over; the message names who. Nothing was
    exchanged, and the readers go on."""

    code = "readers_inside"


class DecisionUnknown(NotReadyError):
    """Rank 0 was asked to commit a change and does not answer. It is committed everywhere, or nowhere, once it does."""

    code = "decision_unknown"


class DeploymentError(WeightCacheError):
    """Something about processes, paths, permissions or memory of this host has to change."""

    code = "deployment"


class DaemonAbsent(DeploymentError):
    """No socket file: no weights are cached at this place. Raised only where fallback to disk is not allowed."""

    code = "daemon_absent"


class DaemonUnreachable(DeploymentError):
    """The socket file is there but nobody answers behind it: the daemon died after binding."""

    code = "daemon_unreachable"


class DaemonFailed(DeploymentError):
    """The daemon lives, and its load failed; the message carries the daemon's reason."""

    code = "daemon_failed"


class DaemonDraining(DeploymentError):
    """The daemon is stopping and takes no new engines."""

    code = "daemon_draining"


class UntrustedDaemon(DeploymentError):
    """The directory, socket or peer does not belong to someone we trust. Nothing was sent to it."""

    code = "untrusted_daemon"


class UntrustedClient(DeploymentError):
    """The daemon does not serve this user: neither its uid nor its gid is on the daemon's allow-list."""

    code = "untrusted_client"


class InvalidPlace(DeploymentError):
    """The place cannot be a daemon's: path too long, not a socket, a dangling link, no permission."""

    code = "invalid_place"


class GenerationGone(DeploymentError):
    """The place serves another generation now. What this engine has mapped stays valid, and nobody else is given it."""

    code = "generation_gone"


class RanksDisagree(DeploymentError):
    """The ranks of one engine have different weights, or some have a daemon's and some have none. Nothing is computed;
    what was attached is given back."""

    code = "ranks_disagree"


class StageLost(DeploymentError):
    """A trainer, or the daemon it pushes to, went away before all was pushed. What is served has not changed."""

    code = "stage_lost"


class SwapFailed(DeploymentError):
    """The kernel or the driver refused to move memory while one generation took the place of another. The weights are
    what they were before if ``intact``; else nobody may compute with them, and the process should end."""

    code = "swap_failed"

    def __init__(
        self,
        message: str,
        *,
        expected: object = None,
        found: object = None,
        where: object = None,
        next_step: str | None = None,
        intact: bool = True,
    ) -> None:
        super().__init__(message, expected=expected, found=found, where=where, next_step=next_step)
        self.intact = intact


class SnapshotUnwritable(DeploymentError):
    """A snapshot cannot be written there. One that was there before is still whole."""

    code = "snapshot_unwritable"


class PlaceTaken(DeploymentError):
    """Another daemon holds the place's lock. This one touched nothing."""

    code = "place_taken"


class InsufficientMemory(DeploymentError):
    """The shard does not fit in what is free now. Nothing was read or allocated."""

    code = "insufficient_memory"


class DeviceAbsent(DeploymentError):
    """The GPU asked for, or its driver, is not there for this process. Nothing was allocated."""

    code = "device_absent"


class DeviceFailed(DeploymentError):
    """The GPU's driver refused a call; the message names the call and the driver's own word for why."""

    code = "device_failed"


class WorkerDied(DeploymentError):
    """The worker process, or another that works for the daemon (verifies, digests), ended without
    reporting (killed, out of memory). Nothing of it was published.
    """

    code = "worker_died"


class HolderDied(DeploymentError):
    """The process whose memory the weights were has ended, and they are gone with it. A daemon that is started again
    loads them anew.
    """

    code = "holder_died"


class EngineFailed(DeploymentError):
    """An engine, or its adapter, raised while its state was built or its key computed; its own words are in ``found``.

    Nothing was published."""

    code = "engine_failed"


class ManagerUnreachable(DeploymentError):
    """The service manager (systemd, or `weightcached supervise`) does not take or does not answer what it is told.

    What it had accepted before may or may not be in its store."""

    code = "manager_unreachable"


class InvalidEnvironment(DeploymentError):
    """The variables or descriptors this process was started with cannot be what a service manager hands over.

    Nothing was done with them."""

    code = "invalid_environment"


class ConfigurationError(WeightCacheError):
    """What was asked for cannot be given; asking for something else can be."""

    code = "configuration"


class Absent:
    """The type of :data:`ABSENT`, which stands where one side has no value: an absent field is not a null one."""

    def __repr__(self) -> str:
        return "no entry"


ABSENT = Absent()


@dataclass(frozen=True)
class FieldDifference:
    """One field that differs between two configs. ``field`` is a dotted path; values are JSON-like, or ``ABSENT``."""

    field: str
    daemon: object
    client: object

    def __str__(self) -> str:
        return f"{self.field}: daemon has {_shown(self.daemon)}, client asks for {_shown(self.client)}"


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)  # as config.json has it
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


class CacheConfigMismatch(ConfigurationError):
    """The daemon caches another configuration. ``fields`` names every field that differs, with both values: the layout
    first, since most others follow from it.
    """

    code = "config_mismatch"

    def __init__(self, message: str, *, fields: tuple[FieldDifference, ...], where: object = None) -> None:
        fields = tuple(sorted(fields, key=lambda one: one.field != "layout"))
        options = "the daemon's options"
        if fields and fields[0].field == "layout":
            options += f" (layout={_shown(fields[0].daemon)})"
        super().__init__(
            message,
            found="; ".join(map(str, fields)),
            where=where,
            next_step=f"start the engine with {options}, or start another daemon for it under another --name",
        )
        self.fields = fields


class CheckpointMismatch(ConfigurationError):
    """The daemon's weights come from other bytes than the checkpoint the engine named."""

    code = "content_mismatch"


class CheckpointUnproven(ConfigurationError):
    """Neither receipts nor a digest could prove that the daemon's weights are the engine's checkpoint."""

    code = "content_unproven"


class UnsupportedModel(ConfigurationError):
    """This architecture, layout or parallel size is not one the rules cover; the message lists what is."""

    code = "unsupported_model"


class SnapshotMismatch(ConfigurationError):
    """The snapshot is of another configuration or content than what was asked for, or of another release."""

    code = "snapshot_mismatch"


class PushMismatch(ConfigurationError):
    """What a trainer pushed is not what the daemon's plan needs: a name, shape, dtype or box, or something is missing.
    What is served has not changed.
    """

    code = "push_mismatch"


class SwapRefused(ConfigurationError):
    """A generation cannot take the place of the one in use: it has another layout, or this process has written to
    parameters that it would lose. The message names what. Nothing was exchanged."""

    code = "swap_refused"


class InvalidOption(ConfigurationError):
    """An option's value is not one that can be used."""

    code = "invalid_option"


class CheckpointError(WeightCacheError):
    """A file of the checkpoint is wrong; nothing was published. Names the file, and the tensor if there is one."""

    code = "checkpoint"


class HeaderError(CheckpointError):
    """A safetensors header that cannot be true: not JSON, over its limit, offsets out of range, shape against bytes."""

    code = "bad_header"


class IndexFileError(CheckpointError):
    """The index file is unreadable, or there are several candidate files and no index to choose by."""

    code = "bad_index"


class ModelConfigError(CheckpointError):
    """``config.json`` is missing, unreadable, or lacks a field that the layout needs."""

    code = "bad_model_config"


class MissingShard(CheckpointError):
    """The index names a file that is not there."""

    code = "missing_shard"


class TruncatedFile(CheckpointError):
    """A file's size is not what its header accounts for: bytes missing, or bytes left over."""

    code = "truncated_file"


class DuplicateTensor(CheckpointError):
    """One tensor name stands twice: in two files, or twice in one header."""

    code = "duplicate_tensor"


class OverlappingTensors(CheckpointError):
    """Two tensors claim the same bytes of a file, or bytes between tensors belong to none."""

    code = "overlapping_tensors"


class UnknownDtype(CheckpointError):
    """A header names a dtype that safetensors does not define, or that this release cannot place."""

    code = "unknown_dtype"


class PickleRefused(CheckpointError):
    """The checkpoint has only pickle files. They can run code and are never opened."""

    code = "pickle_refused"


class MissingTensor(CheckpointError):
    """The layout expects a tensor that no file has."""

    code = "missing_tensor"


class UnexpectedTensor(CheckpointError):
    """A file has a tensor that the layout neither uses nor knows a reason to ignore."""

    code = "unexpected_tensor"


class ShapeMismatch(CheckpointError):
    """A tensor's shape is not the one ``config.json`` implies."""

    code = "shape_mismatch"


class UnusableValue(CheckpointError):
    """A tensor has a value that cannot be quantized: not finite, or too large for the scale that it would have."""

    code = "unusable_value"


class CheckpointChanged(CheckpointError):
    """A file changed while it was read; what was read is discarded."""

    code = "checkpoint_changed"


class SnapshotUnusable(CheckpointError):
    """A snapshot is not there, torn, truncated, or not what was written; nothing was published."""

    code = "snapshot_unusable"


class ContractError(WeightCacheError):
    """One side broke the contract: a bug in this project or its peer, or a hostile peer."""

    code = "contract"


class ProtocolError(ContractError):
    """A frame or message is not one the protocol allows, or came from another protocol version."""

    code = "protocol"


class TransferError(ContractError):
    """Descriptors, segments or the manifest are not what was announced: count, size, seals, digest, places."""

    code = "transfer"


class InternalError(ContractError):
    """The daemon met an error it did not expect while it answered; its log has the traceback. Nothing was granted."""

    code = "internal"


class PlanError(ContractError):
    """A load plan would leave an element unwritten, write one twice, or read what is not there: a layout's rule is
    wrong.

    Found before anything is read or allocated."""

    code = "plan"


class BindError(ContractError):
    """Weights and module do not fit: a parameter missing, left over, of other shape or dtype, or left uninitialised."""

    code = "bind"


class BarrierError(ContractError):
    """Weights were to be exchanged while somebody may compute with them, or a barrier was used in a way that holds
    nobody. Nothing was exchanged."""

    code = "barrier"


RESTARTING = (NotReadyError, DaemonAbsent, DaemonUnreachable, DaemonDraining)
"""What is met while a daemon is being started again, and passes by itself where one is to come back."""


def _leaves(cls: type[WeightCacheError]) -> dict[str, type[WeightCacheError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_leaves(child))
    return found


ERRORS_BY_CODE: dict[str, type[WeightCacheError]] = _leaves(WeightCacheError)
"""Wire code → class, for turning a refusal or a worker's failure back into an error."""


def error_from(fields: Mapping[str, Any]) -> WeightCacheError:
    """The error that another process of ours reported as ``code``, ``message``, ``expected``, … (its ``as_fields``)."""
    kind = ERRORS_BY_CODE.get(str(fields.get("code")), WeightCacheError)
    if kind is CacheConfigMismatch:
        kind = WeightCacheError  # is made from differing fields, and only clients raise it
    return kind(
        str(fields.get("message")),
        expected=fields.get("expected"),
        found=fields.get("found"),
        where=fields.get("where"),
        next_step=fields.get("next_step"),
    )
