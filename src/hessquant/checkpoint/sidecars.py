"""The files beside the weights: which of them a user of the checkpoint needs, and what in them is of this machine."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from hessquant.checkpoint.reader import CONFIG_FILE, INDEX_FILE
from hessquant.errors import SourceError
from hessquant.files import replacing

QUANTIZATION_FILE = "quantize_config.json"
"""Where GPTQ readers older than `config.json`'s `quantization_config` look."""

_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|pkl|pickle|joblib|npz|npy|h5|hdf5|keras|msgpack|ot|pb|tflite|onnx|onnx[._]data"
    r"|gguf|ggml|ggjt|nemo|mlmodel|mar|engine|pte|llamafile|distcp|index\.json|json\.index"
    r"|(data|index)(-\d+-of-\d+)?)",
    re.IGNORECASE,
)
"""Weights in whatever form, and what lists them: the result has weights and a list of its own."""

_OF_ANOTHER_QUANTIZATION = re.compile(
    r"(.*[-_.])?quant(ize|ized|izer|ization|izing|s)?[-_.]?(config|args|arguments|strategy|log|meta|metadata|params"
    r"|results?|state|model_description)([-_.].*)?\.(json|ya?ml|csv|txt|log)"
    r"|recipe\.ya?ml|measurement\.json|(.*[-_.])?(scales?|amax|act_stats|imatrix)\.(json|dat)",
    re.IGNORECASE,
)
"""What another tool said of another quantization; a reader could take it for this one's."""

_OF_TRAINING = re.compile(r"trainer_state\.json|events\.out\.tfevents.*", re.IGNORECASE)
"""Logs of a training, with the paths of the machine that it ran on."""

_OTHER_FORMS = re.compile(
    r"original|metal|onnx|openvino|coreml|tflite|.*\.(mlpackage|mlmodelc)|checkpoint-\d+|runs|wandb|mlruns|__pycache__",
    re.IGNORECASE,
)
"""Folders with the model in another form, with stages and logs of its training, or with what Python keeps."""

_WRITTEN_ANEW = {Path(CONFIG_FILE), Path(QUANTIZATION_FILE)}

_LOCAL = {"_commit_hash", "_name_or_path"}
_PATHS = re.compile(r".*(name_or_path|_file|_path|_dir|_directory)")


def refuse_sidecars(source: Path, out: Path, reports: Collection[str]) -> None:
    """Check that what will be copied beside the weights can be: regular files, none in the way of what is written.

    Args:
        source: The source directory.
        out: The output, which may lie inside it.
        reports: Names of the files that are written besides the checkpoint.

    Raises:
        SourceError: Naming the file.
    """
    for path in _sidecars(source, out.resolve()):
        if not path.is_file():
            raise SourceError(f"{path} is not a regular file, so it cannot be copied; remove it or what it links to")
    for name in (CONFIG_FILE, QUANTIZATION_FILE, INDEX_FILE, *reports):
        if (source / name).is_dir():
            raise SourceError(f"{source / name} is a directory, where the output has a file of that name; rename it")


def copy_sidecars(source: Path, out: Path, reports: Collection[str]) -> None:
    """Copy every file that a user of the checkpoint may need and that is not written anew.

    They are copied byte for byte, but for settings that name a place on the machine where they were saved.
    """
    for path in _sidecars(source, out.resolve()):
        if str(path.relative_to(source)) in reports:
            continue
        changed = _without_places(path) if path.suffix == ".json" else None
        with path.open("rb") as original, replacing(out / path.relative_to(source)) as copy:
            if changed is None:
                shutil.copyfileobj(original, copy)
            else:
                copy.write(changed)


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what only the machine knows that saved it: where it came from, and absolute paths by name."""
    return {name: _portable(value) for name, value in config.items() if not _is_place(name, value)}


def _portable(value: Any) -> Any:
    if isinstance(value, dict):
        return portable(value)
    return [_portable(item) for item in value] if isinstance(value, list) else value


def _is_place(name: str, value: Any) -> bool:
    if not isinstance(value, str) or not _PATHS.fullmatch(name):
        return name in _LOCAL
    is_absolute = PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute() or value.startswith("~")
    return name in _LOCAL or is_absolute


def _without_places(path: Path) -> bytes | None:
    """The content of a JSON file without absolute paths in its settings; None where it has none, or is no settings."""
    if path.name.endswith(("tokenizer.json", "vocab.json")) or "config" not in path.name:
        return None  # large, and no settings
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    changed = portable(content)
    return None if changed == content else (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def _sidecars(source: Path, out: Path) -> Iterator[Path]:
    # The output may lie inside the source, and its run directory beside it.
    outputs = {out, out.with_name(f"{out.name}.run")}
    for folder, folders, files in os.walk(source):
        here = Path(folder)
        # Pruned in place: hidden folders, other forms of the model, and what is being made.
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not _OTHER_FORMS.fullmatch(name) and (here / name).resolve() not in outputs
        )
        for file in sorted(files):
            path = here / file
            left = any(kind.fullmatch(file) for kind in (_WEIGHTS, _OF_ANOTHER_QUANTIZATION, _OF_TRAINING))
            if not left and not file.startswith(".") and path.relative_to(source) not in _WRITTEN_ANEW:
                yield path
