"""From a checkpoint to a rank's finished shard: reading, planning, filling, quantizing, and the worker that does it."""
