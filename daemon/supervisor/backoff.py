"""How long to wait before a keeper that died is started again. Owns the arithmetic; pure, looks at no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_S = 0.1


@dataclass(kw_only=True)
class BackOff:
    """No pause after a long life, then 0.1 s, 0.2 s, … up to ``max_s`` as long as each life is shorter than
    ``reset_s``.
    """

    max_s: float
    reset_s: float
    _next_s: float = field(default=0.0, init=False)

    def pause_after(self, lived_s: float) -> float:
        """The pause in seconds after a life that lasted so long."""
        if lived_s >= self.reset_s:
            self._next_s = 0.0
        pause_s = min(self._next_s, self.max_s)
        self._next_s = min(2 * self._next_s, self.max_s) if self._next_s else FIRST_S
        return pause_s
