"""`make bench`: how fast this is, beside what others do, on the machine it runs on. Not part of the test suite.

One module per benchmark (`attach`, `load`, `reads`, `touch`), each with `run(settings, workspace) -> Outcome`; the
modules that run inside measured processes lie in `sharing/`, `loading/` and `measured/`. The product is used through
what its users use: `attach`, `weightcached serve`, and the loader's `pipeline`.
"""
