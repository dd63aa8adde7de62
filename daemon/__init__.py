"""The keeper: states, serving, leases and control of one place, and the `weightcached` command."""
