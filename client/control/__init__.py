"""Changes of live weights over all ranks of a group."""
