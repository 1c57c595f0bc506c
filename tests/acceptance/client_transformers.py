"""Log-probabilities of a passage, or embeddings of texts, by transformers.

Called as `answering.py` says, by the python of an environment that holds what transformers needs for the format:
optimum and gptqmodel, or compressed-tensors.

    --dtype TYPE     16-bit type to load in; the checkpoint's own by default
    --dequantize     decode all weights of compressed-tensors while loading
    --backend NAME   kernel of GPTQModel; otherwise it chooses one
    --embed          the checkpoint is an encoder
    --uses NAME...   distributions whose versions count
"""

import argparse
import sys

from answering import Passage, answer, versions

PACKED = ("qweight", "weight_packed")


def ask(checkpoint: str, passage: Passage, *options: str) -> list[float]:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, CompressedTensorsConfig, GPTQConfig

    given = _parse(options)
    loading = {}
    if given.dequantize:
        loading["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if given.backend:
        # Of its settings only this one counts, the others are the checkpoint's.
        loading["quantization_config"] = GPTQConfig(bits=4, backend=given.backend)
    dtype = getattr(torch, given.dtype) if given.dtype else "auto"
    model, outcome = (AutoModel if given.embed else AutoModelForCausalLM).from_pretrained(
        checkpoint, dtype=dtype, device_map="cpu", output_loading_info=True, **loading
    )
    # It says so in a table of warnings only, and goes on with random numbers.
    if outcome["missing_keys"]:
        missing = ", ".join(map(repr, sorted(outcome["missing_keys"])))
        raise RuntimeError(f"transformers opened the checkpoint with random numbers for {{{missing}}}")
    if not given.dequantize and not any(hasattr(module, part) for module in model.modules() for part in PACKED):
        raise RuntimeError("transformers opened the checkpoint without a quantized layer in it")
    with torch.inference_mode():
        if given.embed:
            texts = [model(torch.tensor([ids])).last_hidden_state[0].float().mean(0) for _, ids in passage.tokenized]
            return torch.nn.functional.normalize(torch.stack(texts), dim=-1).flatten().tolist()
        ids = torch.tensor([passage.ids])
        logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()


def _parse(options: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--backend")
    parser.add_argument("--embed", action="store_true")
    parser.add_argument("--uses", nargs="+", default=[])
    return parser.parse_args(options)


if __name__ == "__main__":
    answer(ask, versions("transformers", *_parse(tuple(sys.argv[1:])).uses), ["torch", "transformers.models.llama"])
