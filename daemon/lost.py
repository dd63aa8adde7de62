"""What was served last and has not come back from the vault: other weights must not take its place in silence.

Owns deciding whether that is so, from the record that custody keeps, and the refusal that says what to do. Used by
``acquiring.py``, before it adopts and before it loads. Changes nothing.
"""

from __future__ import annotations

from weightcached.daemon.custody import Custody
from weightcached.daemon.generation import Origin
from weightcached.protocol.errors import GenerationGone


def loses_what_was_served(custody: Custody, model: str) -> bool:
    """Whether to adopt anything now would put other weights in the place of those that were served last, though
    ``--model`` says what it said then: nobody has asked for others.
    """
    lost = custody.lost
    if lost is None:
        return custody.record_lost and len(custody.candidates) > 1
    if lost.under_model is not None:
        return lost.under_model == model
    return Origin(lost.model_dir, lost.hub_id).is_what(model)


def require_nothing_lost(custody: Custody, model: str) -> None:
    """Raises GenerationGone where to load ``model`` would do so, too: a change had brought what is lost."""
    lost, candidates = custody.lost, sorted(custody.candidates)
    if not loses_what_was_served(custody, model) or (lost is not None and lost.under_model is None):
        return
    release = "to load what --model says: `weightcached release`, then start the daemon again"
    held = ", ".join(f"generation {one}" for one in candidates) or "none"
    if lost is None:
        raise GenerationGone(
            "the vault has lost the record of what was served, and holds several generations",
            expected="a record that says which of them was served last",
            found=held,
            next_step=release,
        )
    if lost.pushed_by is None:
        origin, again = (
            lost.model_dir,
            f"to serve them again: start the daemon with --model {lost.model_dir}; {release}",
        )
    else:
        origin, again = f"a push by {lost.pushed_by}", f"{release}, and push again"
    raise GenerationGone(
        "the weights that were served last have not come back whole, and no others are put in their place unasked",
        expected=f"generation {lost.id}, from {origin}",
        found=held,
        next_step=again,
    )
