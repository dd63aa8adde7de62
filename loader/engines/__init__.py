"""Engine-made layouts in the worker: the engine's state, built by its adapter, becomes a segment and its rows.

Knows no engine. `protocol/engines.py` is what an adapter is; `README.md` here is for whoever writes one.
"""
