"""A lying daemon and a lying client that follow a script, for tests of whoever speaks this protocol."""
