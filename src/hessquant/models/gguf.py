"""A `.gguf` file as a Hugging Face directory: config, tokenizer, and an index of what makes which weight.

The directory holds no weights. It is made once per file, in the user's cache.
"""

import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from hessquant.errors import SourceError
from hessquant.models.gguf_header import Header, numbered_block, read_header
from hessquant.models.gguf_values import Stamp, fits_float16, open_unchanged, refuse_kinds, values_of
from hessquant.models.gguf_weights import MadeWeight, Maker, made_weights
from hessquant.models.library import from_config, reason, refusing
from hessquant.place import HOST, NOWHERE

INDEX_FILE = "model.gguf.index.json"
"""In the directory: which file it is of, and what in that makes which weight."""

# Part of the cache key: raise it when what is in the directory changes.
_CONVERSION = 2

_ADVICE = "Start from the model's Hugging Face directory instead"
_PART = re.compile(r".*-\d{5}-of-\d{5}\.gguf")
_ROTARY = re.compile(r"(?:^|\.)rope_(?:freqs|factors_long|factors_short)\.weight$")


@dataclass(frozen=True)
class GgufIndex:
    """What the directory of a file says of it.

    Attributes:
        file: The file.
        stamp: By what it is seen that it is still the same.
        maker: Makes the weights.
        weights: What the file's tensors make.
        left: Tensors that make none, and why the model does not need them.
    """

    file: Path
    stamp: Stamp
    maker: Maker
    weights: tuple[MadeWeight, ...]
    left: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        content = {
            "file": str(self.file),
            "stamp": asdict(self.stamp),
            "architecture": self.maker.architecture,
            "settings": self.maker.settings,
            "keys": self.maker.keys,
            "weights": [asdict(weight) for weight in self.weights],
            "left": self.left,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_index(directory: Path) -> GgufIndex | None:
    """What a directory says of a GGUF file; None if it is not that of one.

    Raises:
        SourceError: If what is there cannot be read.
    """
    path = directory / INDEX_FILE
    if not path.exists():
        return None
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        weights = tuple(
            MadeWeight(**(each | {"shape": tuple(each["shape"]), "parts": tuple(each["parts"])}))
            for each in said["weights"]
        )
        maker = Maker(said["architecture"], said["settings"], said["keys"])
        return GgufIndex(Path(said["file"]), Stamp(**said["stamp"]), maker, weights, said["left"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read ({reason(error)}); remove {directory}") from error


def cache_directory() -> Path:
    """Where these directories are kept: $HESSQUANT_CACHE, or `hessquant` in the user's cache directory."""
    if explicit := os.environ.get("HESSQUANT_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hessquant"


def describe(file: Path) -> Path:
    """Directory that describes a `.gguf` file; made on the first call, found after that.

    Raises:
        SourceError: If the file cannot be read, its architecture is not one that transformers reads from such files, or
            its tensors are not those of its model.
    """
    target = cache_directory() / "gguf" / _key(file)
    if (target / INDEX_FILE).is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=target.parent))
    except OSError as error:
        raise SourceError(f"{file.name}: cannot write to the cache; set HESSQUANT_CACHE: {error}") from error
    try:
        # The reader's progress bar cannot be switched off, only sent elsewhere.
        with refusing(f"{file.name}: transformers cannot read this file", _ADVICE), redirect_stderr(io.StringIO()):
            _describe(file, draft)
            _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _key(file: Path) -> str:
    # Path, size and time of the last change, as make does it: hashing 40 GB would take longer than `plan` may.
    status, library = file.stat(), importlib.metadata.version("transformers")
    identity = f"{_CONVERSION}|{library}|{file.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    return f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _publish(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        # Another process may have described the same file in the meantime; its result is as good.
        if not (target / INDEX_FILE).is_file():
            raise


def _describe(file: Path, directory: Path) -> None:
    stamp, header = Stamp.of(file.stat()), read_header(file)
    if header.parts > 1 or _PART.fullmatch(file.name):
        raise SourceError(
            f"{file.name} is one of several files that hold one model; make one of them with llama.cpp's "
            "llama-gguf-split --merge FIRST-FILE WHOLE-FILE"
        )
    # In two steps what AutoConfig does in one: the processors want these settings as well, which take seconds to read.
    settings, _ = PreTrainedConfig.get_config_dict(file.parent, gguf_file=file.name)
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(dict(settings))
    layers = config.get_text_config().num_hidden_layers
    if layers > header.blocks:
        raise SourceError(
            f"{file.name}: its config has {layers} layers, but it holds tensors of {header.blocks} blocks"
        )
    # The reader keeps the file's title there, which means nothing to anybody.
    vars(config).pop("_model_name_or_path", None)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    with NOWHERE:
        model = from_config(config, HOST.dtype)
    model.tie_weights()
    try:
        with open_unchanged(file, stamp) as stream:
            index = _index(file, stamp, header, model, settings, stream)
            fits = _fits_float16(index, header, stream)
    except SourceError as error:
        raise SourceError(f"{file.name}: {error}. {_ADVICE}") from error
    config.architectures, config.dtype = [type(model).__name__], torch.float16 if fits else HOST.dtype
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    index.write(directory / INDEX_FILE)


def _index(
    file: Path,
    stamp: Stamp,
    header: Header,
    model: PreTrainedModel,
    settings: Mapping[str, Any],
    stream: BufferedReader,
) -> GgufIndex:
    """What the file's tensors make of the model.

    Raises:
        SourceError: If they do not make all of it, or are more than the model has; does not name the file.
    """
    tensors = header.tensors
    refuse_kinds(tensors.values())
    _refuse_scaling(header.rope_scaling, model.config)
    maker = Maker.of(model, header.architecture, settings)
    made, unused = made_weights(maker, tensors)
    first = {name: names[0] for names in _names(model) for name in names}
    weights: dict[str, MadeWeight] = {}
    left: dict[str, str] = {}
    # A tied weight is written once, under the name that comes first in the model.
    for weight in sorted(made, key=lambda weight: first.get(weight.name, weight.name) != weight.name):
        name = first.get(weight.name, weight.name)
        if name in weights:
            left |= dict.fromkeys(weight.parts, f"tied to {name}")
        else:
            weights[name] = replace(weight, name=name)
    rotary = {name for name in unused if _ROTARY.search(name)}
    _refuse_unfit(weights, first, [name for name in unused if name not in rotary], model)
    for name in rotary:
        if not (values_of(stream, tensors[name], 0, tensors[name].rows) == 1).all():
            _refuse_positions(name)
    left |= dict.fromkeys(sorted(rotary), "factors of the rotary embedding, which are all 1")
    return GgufIndex(file.resolve(), stamp, maker, tuple(weights.values()), left)


def _names(model: PreTrainedModel) -> Iterable[list[str]]:
    """All names of each parameter, in the order of the model."""
    together: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        together.setdefault(id(parameter), []).append(name)
    return together.values()


def _refuse_unfit(
    weights: Mapping[str, MadeWeight], first: Mapping[str, str], unknown: Sequence[str], model: PreTrainedModel
) -> None:
    state = model.state_dict()
    absent = [name for name in dict.fromkeys(first.values()) if name not in weights]
    if absent or unknown:
        raise SourceError(
            f"its tensors do not fit the architecture it names: missing {absent[:5]}, unknown {unknown[:5]}"
        )
    for name, weight in weights.items():
        if tuple(state[name].shape) != weight.shape:
            raise SourceError(
                f"its tensors do not fit the architecture it names: {name}, made of {', '.join(weight.parts)}, is "
                f"{list(weight.shape)}, but {list(state[name].shape)} by its settings"
            )


def _refuse_scaling(stated: str, config: PreTrainedConfig) -> None:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if stated not in ("", "none") and rope.get("rope_type", "default") == "default":
        _refuse_positions(f"rope.scaling.type, which is {stated},")


def _refuse_positions(what: str) -> NoReturn:
    raise SourceError(
        f"{what} changes what positions are to the model, and transformers does not read that from a file"
    )


def _fits_float16(index: GgufIndex, header: Header, stream: BufferedReader) -> bool:
    parts = [header.tensors[part] for weight in index.weights for part in weight.parts]
    return all(fits_float16(stream, part, in_block=numbered_block(part.name) is not None) for part in parts)
