"""A process that has vLLM and answers: a request is a line of JSON on standard input, its answer a line of JSON.

A first line on what was standard output says that it is ready. What vLLM prints goes to standard error. The process
ends when its input does. Run by path, beside the programs that use it.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable


def answer_requests(made: Callable[[str], Callable[..., dict]]) -> None:
    """Call what ``made(folder)`` gives with the fields of each request. The folder is for this process's files. An
    error is an answer too: ``{"error": its traceback}``.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_CACHE_ROOT"] = folder
        asked = made(folder)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            answer: dict
            try:
                answer = asked(**json.loads(line))
            except Exception:  # noqa: BLE001 - whatever the engine raises is the answer
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)
