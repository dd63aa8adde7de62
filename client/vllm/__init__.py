"""vLLM with weights from the daemon: load format `weightcached`, and `weightcached launch`. See README.md here.

Modules: `plugin` (what vLLM finds by its entry point), `loader` (the order of a start), `options` (what was asked for),
`obtain` (weights of this rank), `ranks` (this worker's place among vLLM's ranks), `together` (all ranks compare what
they have), `in_place` (binding, and post-processing that leaves parameters where they are), `processed` (weights that
are post-processed already), `report` (what a start did, in one line), `launch` (the command), `switching` (another
generation under a running engine) and `swapping` (under one model). For the daemon's side of
layout `vllm`: `adapter` (its key), `building` (how it is made) and `alone` (a process as one rank without its peers).
vLLM and torch are imported in functions, or by modules that vLLM alone imports.
"""
