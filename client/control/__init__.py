"""The control plane for whoever asks and listens: events as they happen, and the commands ``ctl`` and ``events``."""
