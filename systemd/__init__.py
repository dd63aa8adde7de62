"""The systemd files, as they are installed by ``weightcached install-units``: data that nothing imports.

Owns the units, ``sysusers.d``, ``tmpfiles.d`` and the sample of the environment file. They name
``/usr/bin/weightcached``; ``daemon/install_units.py`` puts the real path there. What an operator has to know stands in
``README.md`` beside them.
"""
