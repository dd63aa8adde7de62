"""The control plane's daemon side: commands and events over ZeroMQ. Imported after the data plane listens."""
