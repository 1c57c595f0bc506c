"""Turning a `.gguf` file into a Hugging Face directory, once."""

import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hessquant.errors import SourceError
from hessquant.models.gguf_header import check_header
from hessquant.models.library import from_config, refusing
from hessquant.place import HOST, NOWHERE

# Part of the cache key: raise it when the conversion changes.
_CONVERSION = 1


def cache_directory() -> Path:
    """Where converted models are kept: $HESSQUANT_CACHE, or `hessquant` in the user's cache directory."""
    if explicit := os.environ.get("HESSQUANT_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hessquant"


def converted(file: Path) -> Path:
    """Directory with the dequantized model of a `.gguf` file; converted on the first call, found after that.

    The weights are stored in float16 (of which GGUF's block scales are made) if every value is finite there, else in
    float32.

    Raises:
        SourceError: If the file cannot be read, or its architecture is not one that transformers can convert.
    """
    target = cache_directory() / "gguf" / _key(file)
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=target.parent))
    except OSError as error:
        raise SourceError(f"{file.name}: cannot write to the cache; set HESSQUANT_CACHE: {error}") from error
    advice = "Start from the model's Hugging Face directory instead"
    try:
        # The reader's progress bar cannot be switched off, only sent elsewhere.
        with refusing(f"{file.name}: transformers cannot convert this file", advice), redirect_stderr(io.StringIO()):
            _convert(file, draft)
            _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _key(file: Path) -> str:
    # Path, size and time of the last change, as make does it: hashing 40 GB would take longer than `plan` may.
    status = file.stat()
    identity = f"{_CONVERSION}|{file.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    return f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _publish(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        # Another process may have converted the same file in the meantime; its result is as good.
        if not (target / "config.json").is_file():
            raise


def _convert(file: Path, directory: Path) -> None:
    blocks = check_header(file)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    layers = config.get_text_config().num_hidden_layers
    if layers > blocks:
        raise SourceError(f"{file.name}: its config has {layers} layers, but it holds tensors of {blocks} blocks")
    # The reader keeps the file's title there, which means nothing to anybody.
    vars(config).pop("_model_name_or_path", None)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    with NOWHERE:
        model = from_config(config, HOST.dtype)
    parsed = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=HOST.dtype)  # type: ignore[no-untyped-call]
    tensors = parsed["tensors"]
    dtype = _storage_dtype(tensors)
    _fill(model, {name: tensors.pop(name).to(dtype) for name in list(tensors)}, file.name)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _storage_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    fits = all(bool(torch.isfinite(tensor.to(torch.float16)).all()) for tensor in tensors.values())
    return torch.float16 if fits else HOST.dtype


def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor], name: str) -> None:
    """Give the weights to a model on the meta device.

    Raises:
        SourceError: If a weight of the model is not in the file, or has another shape there.
    """
    try:
        outcome = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise SourceError(f"{name}: its tensors do not fit the architecture it names: {error}") from error
    model.tie_weights()
    absent = [key for key, parameter in model.named_parameters() if parameter.is_meta]
    if absent or outcome.unexpected_keys:
        raise SourceError(
            f"{name}: its tensors do not fit the architecture it names: missing {absent[:5]}, "
            f"unknown {outcome.unexpected_keys[:5]}"
        )
