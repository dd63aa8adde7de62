"""Filling segments with what a trainer pushes: tensors of a checkpoint's names, in boxes, in whatever order they come.

The plan is the one that a load of the checkpoint would have; only where the bytes come from is another. `serve.py`
converses, `wanted.py` says what is needed, `ledger.py` that each box comes once, `receiving.py` brings it to its place,
`base.py` has what is not pushed.
"""
