"""Declarative rules per architecture: which checkpoint tensors make which parameter, and how each is sharded."""
