"""Runs real vLLM engines one after the other in this process and writes down what they generated and what our experts executed.

`python drive.py SPEC OUT`: both JSON. SPEC: a list of {"model", "backend", and keywords of vllm.LLM}; OUT: a list of
{"tokens", "before", "after"}, the latter the calls that each process had witnessed when generating began and ended. Further keys of
ours: "reload": a folder whose weights replace the model's, which then answers once more, as "reloaded"; "sleep": a level; the engine
sleeps and wakes, and answers once more, as "woken"; "environ": variables for this engine alone; "fails": true: start-up has to end with
an error, and OUT has {"error", "ended"}, its words and the time. OUT is written after each engine: it has those before one that breaks. A line
`BEGINS` in the log says where each engine's part of it begins.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = [[1 + i, 2, 3, 4, 5, 7 * i + 3] for i in range(4)] + [list(range(20, 60))]
NEW_TOKENS = 12
BEGINS = "=== the next engine begins"


def witnessed() -> dict[str, int]:
    return {path.name: len(path.read_text().split()) for path in Path(os.environ["WITNESS_DIR"]).iterdir()}


def answer(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    first = int(os.environ.get("VLLM_DP_RANK", 0))  # replicas of data parallelism have unlike batches
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[first:]], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def ask(llm: Any, reload: object, sleep: object) -> dict[str, object]:
    before = witnessed()
    result: dict[str, object] = {"tokens": answer(llm), "before": before, "after": witnessed()}
    if reload is not None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": reload})
        result["reloaded"] = answer(llm)
    if sleep is not None:
        llm.sleep(level=sleep)
        llm.wake_up()
        result["woken"] = answer(llm)
    return result


def serve(engine: dict[str, Any]) -> dict[str, object]:
    from vllm import LLM

    keywords: dict[str, Any] = {
        "enforce_eager": True, "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8, "seed": 0,
        "skip_tokenizer_init": True, "enable_prefix_caching": False, **engine,
    }  # fmt: skip
    reload, sleep, fails = (keywords.pop(name, None) for name in ("reload", "sleep", "fails"))
    if not fails:
        return ask(LLM(moe_backend=keywords.pop("backend"), **keywords), reload, sleep)
    try:
        LLM(moe_backend=keywords.pop("backend"), **keywords)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "ended": time.monotonic()}
    raise AssertionError("the engine started")


def main(spec: list[dict[str, Any]], out: Path) -> None:
    from vllm import LLM  # noqa: F401
    from vllm.distributed import cleanup_dist_env_and_memory

    results = list[dict[str, object]]()
    for engine in spec:
        print(f"\n{BEGINS}", flush=True)
        environ = engine.pop("environ", {})
        usual = {name: value for name, value in os.environ.items() if name in environ}
        os.environ |= environ
        gc.freeze()  # what was imported is never garbage, and an engine collects several times
        results.append(serve(engine))
        out.write_text(json.dumps(results))
        gc.collect()
        cleanup_dist_env_and_memory()
        for name in environ:
            del os.environ[name]
        os.environ |= usual


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
