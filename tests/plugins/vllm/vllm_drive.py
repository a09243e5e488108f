"""Runs real vLLM engines one after the other in this process and writes down what they generated and what our experts executed.

`python drive.py SPEC OUT`: both JSON. SPEC: a list of {"model", "backend", and keywords of vllm.LLM}; OUT: a list of
{"tokens", "before", "after"}, the latter the calls that each process had witnessed when generating began and ended. Further keys of
ours: "reload": a folder whose weights replace the model's, which then answers once more, as "reloaded"; "sleep": a level; the engine
sleeps and wakes, and answers once more, as "woken".
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[1 + i, 2, 3, 4, 5, 7 * i + 3] for i in range(4)] + [list(range(20, 60))]
NEW_TOKENS = 12


def witnessed() -> dict[str, int]:
    return {path.name: len(path.read_text().split()) for path in Path(os.environ["WITNESS_DIR"]).iterdir()}


def answer(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    first = int(os.environ.get("VLLM_DP_RANK", 0))  # replicas of data parallelism have unlike batches
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[first:]], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(spec: list[dict[str, object]]) -> list[dict[str, object]]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    results = []
    for engine in spec:
        keywords: dict[str, object] = {
            "enforce_eager": True, "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8, "seed": 0,
            "skip_tokenizer_init": True, "enable_prefix_caching": False, **engine,
        }  # fmt: skip
        reload, sleep = keywords.pop("reload", None), keywords.pop("sleep", None)
        llm = LLM(moe_backend=keywords.pop("backend"), **keywords)
        before = witnessed()
        results.append({"tokens": answer(llm), "before": before, "after": witnessed()})
        if reload is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": reload})
            results[-1]["reloaded"] = answer(llm)
        if sleep is not None:
            llm.sleep(level=sleep)
            llm.wake_up()
            results[-1]["woken"] = answer(llm)
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
