"""A toy engine: a multi-layer perceptron whose weights are packed after loading. Knows nothing of weightcached, but for
`adapter.py` and `cached.py`.
"""
