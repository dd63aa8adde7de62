"""`weightcached supervise`: keeps a keeper running, and its descriptors while it does not. No torch, no threads."""
