"""What an engine uses: attach to a daemon (or load from disk, by the contract), and bind weights into a module.

Importing this imports neither torch nor the loader: torch comes with the first tensor, the loader with a load from
disk.
"""

from weightcached.client.attach import attach
from weightcached.client.barrier import Barrier, Stopped
from weightcached.client.bind import BindReport, bind, meta_parameters
from weightcached.client.exchange import Progress
from weightcached.client.following import Follower, Published
from weightcached.client.holder import HOLDER_LOST_EXIT, OnHolderLost
from weightcached.client.lease import Lease
from weightcached.client.stale import STALE_EXIT, OnStale
from weightcached.client.swap import Staged, Swapped
from weightcached.client.weights import WeightSet

__all__ = [
    "HOLDER_LOST_EXIT",
    "STALE_EXIT",
    "Barrier",
    "BindReport",
    "Follower",
    "Lease",
    "OnHolderLost",
    "OnStale",
    "Progress",
    "Published",
    "Staged",
    "Stopped",
    "Swapped",
    "WeightSet",
    "attach",
    "bind",
    "meta_parameters",
]
