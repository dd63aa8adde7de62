"""A user of the engine: asks it for the same text again and again. Runs in the box.

    python generate_loop.py PORT

Prints the token ids of each answer as a line of JSON. Ends when its standard input does; an answer that is none ends it
with a line that says so, and status 1.
"""

import json
import select
import sys
import urllib.request


def main() -> int:
    url = f"http://127.0.0.1:{sys.argv[1]}/generate"
    body = json.dumps({"prompt": "What memcached is to objects", "max_new_tokens": 16}).encode()
    while not select.select([sys.stdin], [], [], 0)[0]:
        try:
            with urllib.request.urlopen(url, body, timeout=60) as answer:
                print(json.dumps({"token_ids": json.load(answer)["token_ids"]}), flush=True)
        except (OSError, ValueError, KeyError) as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
