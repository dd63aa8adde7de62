"""What attach gives: a mapping from names to tensors over mapped memory. Tensors are made when they are asked for.

Owns :class:`WeightSet`: views, aliases, lifetimes. How the memory came here (a daemon, or the disk) is not its
business. torch is imported when the first tensor is asked for, not before; NumPy arrays (``arrays.py``) need none of
it, and copies (``copies.py``) share no memory with the set.

Cost: the segment becomes one uint8 tensor, that one view per dtype, and each parameter ``as_strided`` of its view:
about two microseconds each, whatever their size.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from weightcached.client.arrays import array_of
from weightcached.client.barrier import Barrier
from weightcached.client.copies import copies
from weightcached.client.following import Follower
from weightcached.client.lease import Lease
from weightcached.client.segments import on_device, on_host, tensor_of, unmap
from weightcached.client.swap import Staged, stage
from weightcached.protocol.errors import TransferError, UnsupportedModel
from weightcached.protocol.integrity import differing_rows
from weightcached.protocol.manifest import Manifest, ManifestMeta, NameAccounting
from weightcached.protocol.memory.kinds import SegmentBytes, SegmentMapping
from weightcached.protocol.messages import Grant

if TYPE_CHECKING:
    import numpy as np
    import torch


class WeightSet(Mapping[str, "torch.Tensor"]):
    """Names → tensors of one generation. Asking twice gives the same object; tied names give the same object.

    In host memory the tensors are private and copy-on-write: writing to one changes this process's pages only, and
    never what others see. On a GPU they are mapped read-only, and whoever writes to one loses its context: copy what
    has to be written (``bind`` does, for buffers). Of memory kind ``cuda-ipc`` nothing is protected: who writes to one
    changes it for everybody, and who reads it is stopped when the daemon ends. Otherwise they stay valid for as long as
    they are referred to, also after :meth:`close` and after the daemon is gone. Without :meth:`close` the lease lives
    as long as the process, whether or not the set is still referred to.

    The tensors of a segment share one storage, all of it, and torch pickles and deep-copies storages: ``pickle`` writes
    the segment once for each tensor, ``torch.save`` once, ``copy.deepcopy`` of a tensor copies all of it. Clone what is
    to be kept (``{name: tensor.clone() …}``, or :meth:`copies`), or save with safetensors.
    """

    def __init__(
        self,
        manifest: Manifest,
        segments: tuple[SegmentMapping, ...],
        *,
        source: Literal["daemon", "disk"],
        version: str,
        receipts_version: str,
        lease: Lease | None,
    ) -> None:
        self.manifest = manifest
        self.source = source
        self.version = version
        """Equal on all ranks of one model state; what ranks compare before the first token."""
        self.receipts_version = receipts_version
        """What stood in for ``version`` before the content digest was known: a second thing to compare on one host."""
        self.lease = lease
        """The lease at the daemon; None for weights from disk."""
        self._segments: tuple[SegmentMapping, ...] | None = segments
        self._resident_nbytes = sum(segment.resident_nbytes for segment in segments)
        self.barrier = Barrier()
        """Who computes with the weights does it in a block of ``barrier.reading()``, if they are ever to be swapped. An
        engine with several weight sets gives all of them one barrier."""
        self._views: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def state(self) -> Literal["connected", "detached", "stale", "unleased", "closed"]:
        """That of the lease; ``unleased`` for weights from disk, which no daemon knows of."""
        if self.lease is not None:
            return self.lease.state
        return "closed" if self._segments is None else "unleased"

    @property
    def meta(self) -> ManifestMeta:
        """What the manifest says about the generation as a whole."""
        return self.manifest.meta

    @property
    def accounting(self) -> NameAccounting:
        """What became of every checkpoint tensor."""
        return self.manifest.accounting

    @property
    def generation(self) -> str:
        return self.meta.generation

    @property
    def resident_bytes(self) -> int:
        """Bytes of all segments: what an engine has to count as taken when it sizes its caches."""
        return self._resident_nbytes

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors are: what an engine builds its module and its inputs on. ValueError after :meth:`close`."""
        return tensor_of(max(self._open(), key=lambda segment: segment.nbytes)).device

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of ``name``. KeyError for an unknown name, ValueError after :meth:`close`."""
        tensor = self._tensors.get(name)
        if tensor is not None:
            return tensor
        return self._tensors.setdefault(name, self._make(name))

    def values(self) -> ValuesView[torch.Tensor]:
        """All tensors, in the manifest's order. Those that are missing are made together, cheaper than one by one."""
        return self._all().values()

    def items(self) -> ItemsView[str, torch.Tensor]:
        """All names with their tensors, as :meth:`values`."""
        return self._all().items()

    def copies(self, *, reuse_memory: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor) in memory of the consumer's own, for an engine that loads by ``load_weights``.

        In the order of the memory, so that a first pass goes through it forward; of tied names one after the other,
        as one piece of memory. Strides stay. Made when it is asked for, and not kept: what is alive is what the
        consumer keeps, and one more. ``reuse_memory`` copies each into the same memory, as large as the largest: a
        tensor is then valid until the next is asked for. That spares the cost of fresh memory, and is enough for an
        engine that copies each before it takes the next; some collect parts that they fuse (``q_a_proj`` of latent
        attention, in SGLang), and need copies that stay. :meth:`items` saves an engine that only reads this copy
        altogether.

        Nothing a consumer does to a copy reaches the set or anybody else. ValueError after :meth:`close`.
        """
        return copies(self, reuse_memory=reuse_memory)

    def numpy(self, name: str, *, bits: bool = False) -> np.ndarray[Any, np.dtype[Any]]:
        """``name`` as a NumPy array over the same mapped memory, without torch; it is also a DLPack exporter.

        As with tensors, a write stays in this process, and the memory stays while the array does. bfloat16 and 8-bit
        floats need the package ``ml_dtypes`` (UnsupportedModel without it); ``bits`` gives any dtype's bits instead, as
        unsigned integers of the same size. KeyError for an unknown name, ValueError after :meth:`close`.
        """
        geometry = self.manifest.geometry(name)
        return array_of(on_host(self._open()[geometry.segment]), geometry, bits=bits, name=name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.names)

    def __len__(self) -> int:
        return len(self.manifest)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest

    def __repr__(self) -> str:
        gigabytes = self.resident_bytes / 1e9
        return f"<WeightSet from {self.source}: {len(self)} names, {gigabytes:.3f} GB, version {self.version}>"

    def differing(self) -> list[str]:
        """Names of parameters whose bytes, as this process sees them, are not those of their digests. Reads all of them
        (several GB/s). What this process wrote to its private pages shows here.
        """
        return differing_rows(self.manifest, self.readable())

    def readable(self) -> list[SegmentBytes]:
        """Each segment's bytes as the host can read them: the memory itself, or pieces of a GPU's, copied when they are
        asked for. ValueError after :meth:`close`.
        """
        return [segment.view() for segment in self._open()]

    def memory(self) -> list[memoryview]:
        """Each segment's bytes, as this process sees them, not to be written. ValueError after :meth:`close`."""
        return [on_host(segment).view().toreadonly() for segment in self._open()]

    def populate(self) -> None:
        """Put every page into this process's page table now, so that it counts as resident, and no first use waits for
        it. Copies nothing. Blocks: about 0.1 s for a GiB of small pages, hardly at all for large ones.
        """
        for segment in self._open():
            segment.populate()

    def verify(self) -> None:
        """Raises TransferError naming the parameters that :meth:`differing` finds."""
        if differing := self.differing():
            raise TransferError(
                "the bytes of parameters are not those of the manifest's digests",
                expected=f"{len(self)} parameters as they were loaded",
                found=f"{len(differing)} differ: {', '.join(differing[:8])}",
                next_step="if this process did not write to them itself, report a bug",
            )

    def revert(self) -> None:
        """Undo whatever this process wrote to mapped weights, and give that memory back: every tensor and array shows
        the bytes that were attached. Nobody may compute with them meanwhile. UnsupportedModel where there are no pages
        of one's own (memory kind ``cuda-ipc``); ValueError after :meth:`close`.
        """
        for segment in self._open():
            segment.revert()

    def unmap(self) -> None:
        """Put weights that are on a GPU to sleep: their addresses stay this process's, and nothing is mapped there.

        Tensors, and graphs that were captured with them, are valid again after :meth:`remap`; whoever uses them before
        loses its context. All work with them must have ended (``torch.cuda.synchronize()``). The memory stays, by this
        process's doing too. UnsupportedModel for weights in host memory, which has nothing to gain, and for memory kind
        ``cuda-ipc``, which has no addresses without memory; ValueError after :meth:`close`. DeviceFailed where the
        driver refuses: the weights are mapped then, as they were, unless the error says that they are not. Trying again
        is safe.
        """
        unmap([on_device(segment) for segment in self._open()])

    def remap(self) -> None:
        """Wake: the same weights at the same addresses. Raises as :meth:`unmap`, and DeviceFailed where the driver
        refuses; trying again is safe.
        """
        for segment in map(on_device, self._open()):
            segment.remap()

    def stage(self, *, generation: str | None = None, version: str | None = None, timeout_s: float = 60.0) -> Staged:
        """Prepare another generation of the same layout aside, by its id or version, or the one that is granted now.

        Blocks for as long as entering its pages takes, about 0.1 s for a GiB; whoever computes goes on. It is moved in
        by :meth:`Staged.swap`, within :attr:`barrier`; then tensors, views, arrays and addresses show it, and
        ``version``, ``generation``, ``manifest`` and the lease are its own. Both are mapped until then.

        Raises GenerationGone where the daemon does not hold it, SwapRefused, naming what differs, for another layout,
        and for memory kind ``cuda-ipc``, whose addresses cannot show another; DaemonNotReady, also where a rank has
        prepared it and reads whether it may serve it, or may know it by its content digest soon: ask again;
        DaemonUnreachable, TransferError; InvalidOption for weights from disk; ValueError after :meth:`close`.
        """
        return stage(self, generation=generation, version=version, timeout_s=timeout_s)

    def follow(self) -> Follower:
        """Who says, between an engine's steps, whether another generation is granted now. InvalidOption for weights
        from disk.
        """
        return Follower(self)

    def close(self) -> None:
        """Give the lease back and forget the tensors made so far. Those handed out stay valid. Safe to call twice."""
        if self.lease is not None:
            self.lease.close()
        self._segments = None
        self._views.clear()
        self._tensors.clear()

    def __enter__(self) -> WeightSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _now(self, manifest: Manifest, grant: Grant) -> None:
        """The segments show another generation: for ``swap.py``."""
        self.manifest = manifest
        self.version, self.receipts_version = grant.version, grant.receipts_version
        if self.lease is not None:
            self.lease.using(grant)

    def _open(self) -> tuple[SegmentMapping, ...]:
        segments = self._segments
        if segments is None:
            raise ValueError("the weight set was closed: attach again")
        return segments

    def _all(self) -> dict[str, torch.Tensor]:
        names, tensors, views = self.manifest.names, self._tensors, self._views
        if len(tensors) == len(names):
            return {name: tensors[name] for name in names}
        every: dict[str, torch.Tensor] = {}
        for name, (segment, offset, form, alias_of) in zip(names, self.manifest.geometries(), strict=True):
            tensor = tensors.get(name)
            if tensor is None:
                if alias_of is not None:
                    tensor = tensors.setdefault(name, self[alias_of])
                else:
                    shape, stride, dtype = form
                    view, itemsize = views.get((segment, dtype)) or self._view(segment, dtype)
                    tensor = tensors.setdefault(name, view.as_strided(shape, stride, offset // itemsize))
            every[name] = tensor
        return every

    def _make(self, name: str) -> torch.Tensor:
        segment, offset, _, shape, stride, dtype, alias_of = self.manifest.geometry(name)
        if alias_of is not None:
            return self[alias_of]  # the manifest has checked that it is the very same place and form
        view, itemsize = self._views.get((segment, dtype)) or self._view(segment, dtype)
        return view.as_strided(shape, stride, offset // itemsize)

    def _view(self, number: int, dtype_name: str) -> tuple[torch.Tensor, int]:
        """A segment as elements of one dtype; bytes at its end that are less than an element belong to no parameter."""
        import torch

        segment = self._open()[number]
        dtype = getattr(torch, dtype_name, None)
        if dtype is None:
            raise UnsupportedModel(
                "this release of torch does not have a dtype of these weights",
                expected=dtype_name,
                found=f"torch {torch.__version__}",
                next_step="install a newer torch",
            )
        whole = tensor_of(segment)[: segment.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return self._views.setdefault((number, dtype_name), (whole, dtype.itemsize))
