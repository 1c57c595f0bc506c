"""Log-probabilities of a passage by transformers with optimum and GPTQModel; run by the python of their environment.

python client_transformers.py CHECKPOINT IDS.json RESULT.json
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def main(checkpoint: str, ids_file: str, result_file: str) -> None:
    ids = torch.tensor([json.loads(Path(ids_file).read_text())])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, device_map="cpu")
    kinds = {type(module).__name__ for module in model.modules() if hasattr(module, "qweight")}
    if not kinds:
        raise SystemExit("transformers opened the checkpoint without a quantized layer in it")
    logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "optimum", "gptqmodel"))
    Path(result_file).write_text(json.dumps({"version": versions, "logprobs": logprobs.tolist()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
