"""Matrix products that an engine has under way while something else happens.

Owns a thread that launches them, and says which of them are not done at a moment: what happens then, happens under
them. Each is compared with the first; nothing but the comparison's count leaves the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from tests.gpu.row import GIB, require

if TYPE_CHECKING:
    import torch

ENOUGH_NBYTES = GIB // 4
"""Of one product, at most."""
AHEAD = 200
"""Products that are launched and not done, on a device. A host computes one at a time, and does not launch ahead."""
LASTING_S = {"cpu": 0.5, "cuda": 0.001}
"""One product, at least: what is under way together outlasts the death of a process, which takes some milliseconds."""
PATIENCE_S = 60.0


class _Product:
    """One that has been begun."""

    def __init__(self) -> None:
        self._mark: Any = None
        self._launched = False

    def launched(self, on: torch.Tensor) -> None:
        """All of it has been given to the device of ``on`` now; on a host it is done then."""
        if on.is_cuda:
            import torch

            self._mark = torch.cuda.Event()
            self._mark.record()
        self._launched = True

    @property
    def done(self) -> bool:
        return self._launched and (self._mark is None or self._mark.query())

    def wait(self) -> None:
        if self._mark is not None:
            self._mark.synchronize()


class Products:
    """Products with ``matrix``, from entering to leaving. Leaving waits for those that are under way, and raises
    AssertionError where one came out other than the first.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        import torch

        self._matrix = matrix
        self._ahead = AHEAD if matrix.is_cuda else 1
        self._operand, self._expected = _lasting(matrix, LASTING_S[matrix.device.type])
        self._product = torch.empty_like(self._expected)
        self._wrong = torch.zeros((), dtype=torch.int64, device=matrix.device)
        self._changed = threading.Condition()
        self._under_way: deque[_Product] = deque()
        self._begun = 0
        self._enough = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._launch, name="products", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._enough = True
        self._thread.join(PATIENCE_S)
        if failed is None:
            self._check()
            wrong = int(self._wrong.item())
            require(wrong == 0, f"{wrong} of {self._begun} products came out other than the first")

    @property
    def finished(self) -> int:
        """How many are done, at least."""
        with self._changed:
            return self._begun - len(self._under_way)

    def wait_for(self, more: int) -> None:
        """Until so many more are done than now."""
        wanted = self.finished + more
        self._wait(lambda: self._begun - len(self._under_way) >= wanted)

    def under_way(self) -> list[_Product]:
        """Those that are, a moment after one was begun."""
        wanted = self._begun + 1
        self._wait(lambda: self._begun >= wanted)
        with self._changed:
            return [product for product in self._under_way if not product.done]

    def _wait(self, met: Any) -> None:
        with self._changed:
            come = self._changed.wait_for(lambda: met() or self._failure is not None, PATIENCE_S)
        self._check()
        require(come, f"after {PATIENCE_S:.0f} s {self._begun} products were begun, too few")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _launch(self) -> None:
        import torch

        try:
            while not self._enough:
                product = _Product()
                with self._changed:
                    self._begun += 1
                    self._under_way.append(product)
                    self._changed.notify_all()
                torch.mm(self._matrix, self._operand, out=self._product)
                self._wrong += (self._product != self._expected).any()
                product.launched(self._product)
                while len(self._under_way) >= self._ahead:
                    self._under_way[0].wait()
                    with self._changed:
                        self._under_way.popleft()
                        self._changed.notify_all()
            for product in self._under_way:
                product.wait()
        except Exception as failure:  # noqa: BLE001 - raised again where somebody waits
            with self._changed:
                self._failure = failure
                self._changed.notify_all()


def _lasting(matrix: torch.Tensor, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
    """An operand with as many columns as make a product last so long, or be ``ENOUGH_NBYTES``; and the product."""
    import torch

    columns = 8
    while True:
        operand = torch.ones(matrix.shape[1], columns, dtype=matrix.dtype, device=matrix.device)
        for _ in range(2):  # the first of a shape prepares for others
            started_s = time.perf_counter()
            product = matrix @ operand
            if product.is_cuda:
                torch.cuda.synchronize()
            lasted_s = time.perf_counter() - started_s
        if lasted_s >= seconds or 2 * product.nbytes > ENOUGH_NBYTES:
            return operand, product
        columns *= 2
