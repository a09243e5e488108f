"""One engine, run to its end in a process of its own: SGLang kills its parent's whole process tree when a scheduler dies.

`serve_once.py '{"engine": {...}, "prompts": [...], "new_tokens": n}'` prints a last line `RESULT [...]`: one SGLang result a prompt.

`serve_once.py template` imports SGLang once. For each line `{"asked": {...}, "environ": {...}, "log": path}` that it reads, it runs an
engine in a fork of itself, which leads a session, and answers with the fork's pid and then its exit code. The engine's own processes
are forks too. All that this spares is importing SGLang three times an engine, which is most of a start.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys


def serve(asked):
    import sglang

    engine = sglang.Engine(**asked["engine"])
    results = asked["prompts"] and engine.generate(
        input_ids=asked["prompts"],
        sampling_params={"temperature": 0, "max_new_tokens": asked["new_tokens"], "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    print("RESULT", json.dumps(results), flush=True)
    engine.shutdown()


def be_a_template():
    import sglang.srt.entrypoints.engine  # noqa: F401  with all that schedulers and detokenizers import

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force: None
    for line in sys.stdin:
        request = json.loads(line)
        if not (pid := os.fork()):
            break
        print(pid, flush=True)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):  # what it left, while its number is still its own
            os.killpg(pid, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    else:
        return
    os.setsid()
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[:0] = [place for place in os.environ["PYTHONPATH"].split(os.pathsep) if place not in sys.path]
    random.seed()
    serve(request["asked"])


if __name__ == "__main__":  # the scheduler's process imports this file again
    if sys.argv[1] == "template":
        be_a_template()
    else:
        serve(json.loads(sys.argv[1]))
