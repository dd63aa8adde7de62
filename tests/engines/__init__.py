"""Live comparison with vLLM's own loader, parameter by parameter: `make test-engines`, or `python -m tests.engines`.

Not part of the plain suite, which has no vLLM. What is compared is what two processes hold: vLLM's (`vllm_loader.py`,
in an environment of its own), and a daemon of ours or our loader. Neither ever reads what the other made, and no mode
that may fall back is used.
"""
