"""Log-probabilities of a passage by vLLM's offline engine; run by the python of vLLM's environment.

python client_vllm.py CHECKPOINT IDS.json RESULT.json
"""

import json
import sys
from pathlib import Path

import vllm
import vllm_product


def main(checkpoint: str, ids_file: str, result_file: str) -> None:
    ids = json.loads(Path(ids_file).read_text())
    vllm_product.install_if_missing()
    engine = vllm.LLM(
        model=checkpoint,
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_model_len=2048,
    )
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": ids}], sampling)
    # The first token has nothing before it.
    pairs = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    logprobs = [position[token].logprob for token, position in pairs]
    Path(result_file).write_text(
        json.dumps({"version": f"vllm {vllm.__version__}{vllm_product.note()}", "logprobs": logprobs})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
