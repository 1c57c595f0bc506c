"""GGUF files of 16-bit models by llama.cpp's own converter, which comes with the sources of llama-cpp-python."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from clients import environments

_SENTENCEPIECE = "sentencepiece==0.2.3"
"""The converter imports it, whether the tokenizer is one of its or not."""


def base_of(model: Path, work: Path) -> Path:
    """The file of a model's directory; made on the first call, as are the converter's files."""
    file = work / "bases" / f"{model.name}.gguf"
    if not file.exists():
        script, needs = _converter(work / "converter")
        draft = file.with_suffix(".draft")
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, script, model, "--outtype", "bf16", "--outfile", draft]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(needs)})
        draft.rename(file)
    return file


def _converter(place: Path) -> tuple[Path, Path]:
    """The converter's script, and a directory with what it needs besides torch and transformers."""
    release = environments.ENVIRONMENTS["llamacpp"].pins["llama-cpp-python"]
    script = place / f"llama_cpp_python-{release}" / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"
    if not script.exists():
        pip = [sys.executable, "-m", "pip", "--quiet"]
        only = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={release}"]
        subprocess.run([*pip, "install", "--no-deps", "--target", place / "needs", _SENTENCEPIECE], check=True)
        subprocess.run([*pip, "download", *only, "--dest", place], check=True)
        with tarfile.open(place / f"llama_cpp_python-{release}.tar.gz") as archive:
            archive.extractall(place, filter="data")
    return script, place / "needs"
