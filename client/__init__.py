"""The engine's side: attach, the fallback-or-raise policy, leases, and binding weights into modules."""
