"""What daemon and client agree on: identity, manifest, messages, framing, errors, places and memory kinds."""
