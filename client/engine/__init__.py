"""`weightcached engine`: a small real server on Transformers whose weights come from disk or from the daemon."""
