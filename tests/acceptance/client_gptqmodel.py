"""Log-probabilities of a passage by GPTQModel's own loader; called as `answering.py` says, by its python."""

from answering import Passage, answer, versions


def ask(checkpoint: str, passage: Passage) -> list[float]:
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    # The kernel in plain torch: the others are for GPUs, or are compiled when they are first used.
    model = GPTQModel.load(checkpoint, dtype=torch.float16, device="cpu", backend=BACKEND.TORCH).model
    if not any(isinstance(module, BaseQuantLinear) for module in model.modules()):
        raise RuntimeError("GPTQModel opened the checkpoint without a quantized layer in it")
    with torch.inference_mode():
        ids = torch.tensor([passage.ids])
        logits = model(input_ids=ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()


if __name__ == "__main__":
    answer(ask, versions("gptqmodel", "transformers"), ["torch", "transformers.models.llama"])
