"""Log-probabilities of a passage by llama.cpp, if its tokenizer agrees with ours; called as `answering.py` says.

The checkpoint is a `.gguf` file, or a directory with one in it.
"""

from pathlib import Path

from answering import Passage, answer, versions


def ask(checkpoint: str, passage: Passage) -> list[float]:
    import numpy as np
    from llama_cpp import Llama

    place = Path(checkpoint)
    (file,) = place.glob("*.gguf") if place.is_dir() else (place,)
    # One batch: the logits then come from the same matrix products as in a plain forward pass.
    size = len(passage.ids) + 1
    model = Llama(str(file), n_ctx=size, n_batch=size, logits_all=True, n_threads=1, verbose=False)
    for text, ids in passage.tokenized:
        # `add_bos` leaves it to the file whether a first token is added, `special` reads the names of special tokens.
        found = model.tokenize(text.encode(), add_bos=True, special=True)
        if found != ids:
            raise ValueError(f"its tokenizer makes {found} of {text!r}, and the checkpoint's own makes {ids}")
    model.eval(passage.ids)
    logits = np.asarray(model.scores[: len(passage.ids) - 1], dtype=np.float64)
    highest = logits.max(axis=1, keepdims=True)
    normalizers = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=1))
    return (logits[np.arange(len(logits)), passage.ids[1:]] - normalizers).tolist()


if __name__ == "__main__":
    answer(ask, versions("llama_cpp_python"))
