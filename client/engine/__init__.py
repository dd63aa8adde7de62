"""`weightcached engine`: a small real server on Transformers whose weights come from disk or from the daemon.

Modules: `options` (what was asked for), `command` (the order of a start), `model` (configuration, tokenizer, module,
weights bound into it), `generate` and `embed` (what the model answers), `service` (one model, one lock, its status),
`following` (switching to what the daemon publishes), `server` (HTTP on loopback). torch and Transformers are imported
in functions: an engine whose daemon is absent says so before it has spent seconds on imports.
"""
