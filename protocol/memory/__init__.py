"""Memory kinds: how a segment is allocated, protected, handed over and mapped; one module per kind."""
