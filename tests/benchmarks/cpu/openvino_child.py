"""Runs in the peers' own environment: OpenVINO GenAI in process, no HTTP, told by JSON lines what to do.

    {"prompt_tokens": 127, "answer_tokens": 64, "streams": 16}  ->  {"seconds": 3.1, "tokens": 1024}
    {"logits": "ids.json", "out": "logits.npy"}                 ->  {"rows": 4000}

Prompts are random ids, so that nothing of an earlier one is found again.
"""

import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

FIRST_ID, LAST_ID = 1_000, 40_000
POOL_GB = 2


def generate(pipeline: Any, ask: dict[str, Any]) -> dict[str, float]:
    genai, openvino = importlib.import_module("openvino_genai"), importlib.import_module("openvino")
    numpy = importlib.import_module("numpy")
    config = genai.GenerationConfig()
    config.max_new_tokens = ask["answer_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    prompts = [
        openvino.Tensor(
            numpy.array(
                [[random.randint(FIRST_ID, LAST_ID) for _ in range(ask["prompt_tokens"])]], dtype=numpy.int64
            )
        )
        for _ in range(ask["streams"])
    ]
    began_at = time.perf_counter()
    answers = pipeline.generate(prompts, [config] * len(prompts))
    took_s = time.perf_counter() - began_at
    return {
        "seconds": took_s,
        "tokens": sum(len(answer.m_generation_ids[0]) for answer in answers),
    }


def logits(folder: str, ask: dict[str, Any]) -> dict[str, int]:
    """Every position's logits of each window, float32, in one array."""
    openvino, numpy = importlib.import_module("openvino"), importlib.import_module("numpy")
    model = openvino.Core().compile_model(f"{folder}/openvino_model.xml", "CPU")
    request = model.create_infer_request()
    found = []
    for window in json.loads(Path(ask["logits"]).read_text()):
        request.reset_state()
        size = len(window)
        inputs = {
            "input_ids": numpy.array([window]),
            "attention_mask": numpy.ones((1, size), dtype=numpy.int64),
            "position_ids": numpy.arange(size)[None],
            "beam_idx": numpy.zeros(1, dtype=numpy.int32),
        }
        names = {name for port in model.inputs for name in port.get_names()}
        answer = request.infer({name: value for name, value in inputs.items() if name in names})
        found.append(answer[model.output("logits")][0].astype(numpy.float32))
    numpy.save(ask["out"], numpy.concatenate(found))
    return {"rows": sum(len(rows) for rows in found)}


def main() -> None:
    folder, num_threads = sys.argv[1], int(sys.argv[2])
    random.seed()
    pipeline: Any = None
    for line in sys.stdin:
        ask = json.loads(line)
        if "logits" in ask:
            answer: dict[str, Any] = logits(folder, ask)
        else:
            if pipeline is None:
                genai = importlib.import_module("openvino_genai")
                scheduling = genai.SchedulerConfig()
                scheduling.cache_size = POOL_GB
                pipeline = genai.ContinuousBatchingPipeline(
                    folder, scheduling, "CPU", {"INFERENCE_NUM_THREADS": num_threads}
                )
            answer = generate(pipeline, ask)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
