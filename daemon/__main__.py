"""``python -m weightcached.daemon`` is the ``weightcached`` command."""

import sys

from weightcached.daemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
