"""vLLM, live: `make test-engines`. Not part of the plain suite, which has no vLLM.

Two things. vLLM's own loader beside ours, parameter by parameter (also `python -m tests.engines`): what is compared is
what two processes hold, vLLM's (`vllm_loader.py`, in an environment of its own), and a daemon of ours or our loader.
Neither ever reads what the other made, and no mode that may fall back is used. And vLLM as an engine
(`vllm_generate.py`), with weights from a daemon and with its own loader: what both say, and what they hold.
"""
