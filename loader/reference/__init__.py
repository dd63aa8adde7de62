"""The naive reference: this rank's parameters sliced out of whole tensors with plain torch, to check the loader by.

Owns nothing that the loader uses and uses nothing of it: no plan, no tables, no boxes, no schemes, no reading of
headers. It goes the other way, as engines' loaders do: it takes the tensors that the files have, one name after the
other, and knows where each belongs (`names.py`), how ranks share it by its own extents (`cuts.py`, `ranks.py`,
`experts.py`), and how what is not quantized yet becomes so (`online.py`). One parameter at a time; speed is no aim.
Where it has no rule it says so (:class:`NotCompared`) and never guesses. Used by ``weightcached verify --against-disk``
and by tests; `tests/engines` compares it with vLLM.
"""

from weightcached.loader.reference.files import NotOnDisk
from weightcached.loader.reference.model import ARCHITECTURES
from weightcached.loader.reference.ranks import NotCompared, Unfit
from weightcached.loader.reference.reference import Reference

__all__ = ["ARCHITECTURES", "NotCompared", "NotOnDisk", "Reference", "Unfit"]
