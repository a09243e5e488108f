"""One engine, run to its end in a process of its own: SGLang kills its parent's whole process tree when a scheduler dies.

`serve_once.py '{"engine": {...}, "prompts": [...], "new_tokens": n}'` prints a last line `RESULT [...]`: one SGLang result a prompt.
"""

import json
import sys


def main() -> None:
    import sglang

    asked = json.loads(sys.argv[1])
    engine = sglang.Engine(**asked["engine"])
    results = asked["prompts"] and engine.generate(
        input_ids=asked["prompts"],
        sampling_params={"temperature": 0, "max_new_tokens": asked["new_tokens"], "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    print("RESULT", json.dumps(results), flush=True)
    engine.shutdown()


if __name__ == "__main__":  # the scheduler's process imports this file again
    main()
