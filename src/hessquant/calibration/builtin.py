"""English text that every CPython carries, so that a run needs no download.

The documents are the topics of `help()` and the docstrings of the standard library. Source files are
parsed, never imported. The text is read from the interpreter that runs, so it differs between Python
versions; the digest in the calibration record tells.
"""

import ast
import functools
import hashlib
import pydoc_data.topics
import random
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

Part = Literal["calibration", "held-out"]

_NOT_PROSE = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "distutils", "encodings", "pydoc_data", "site-packages", "dist-packages"}
)
_HELD_OUT_BYTES = 26  # of 256 first digest bytes: about 10 % of the documents


def builtin_text(part: Part, seed: int = 0) -> str:
    """One part of the built-in text, its documents joined by blank lines.

    A document belongs to one part for good, by a digest of its name. A paragraph that occurs in several documents
    is kept in the first one only, so the two parts share no paragraph.

    Args:
        part: "calibration", shuffled by `seed`, or "held-out", in the order of names.
        seed: Seed of the shuffle; no other random state is read or changed.
    """
    documents = [text for name, text in _documents().items() if is_held_out(name) == (part == "held-out")]
    if part == "calibration":
        random.Random(seed).shuffle(documents)
    return "\n\n".join(documents)


def is_held_out(name: str) -> bool:
    """Whether the document of this name is kept for evaluation."""
    return hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT_BYTES


@functools.cache
def _documents() -> Mapping[str, str]:
    """Text by name, without repeated paragraphs; cached, since parsing the library takes seconds."""
    kept: set[str] = set()
    documents = {}
    for name, text in _all_documents():
        fresh = []
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in kept:
                kept.add(words)
                fresh.append(paragraph.strip("\n"))
        if fresh:
            documents[name] = "\n\n".join(fresh)
    return documents


def _all_documents() -> Iterator[tuple[str, str]]:
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        yield f"topics/{topic}", text
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if _NOT_PROSE.isdisjoint(name.parts):
            yield name.as_posix(), "\n\n".join(_docstrings(ast.parse(path.read_bytes(), name.as_posix())))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings in source order; expressions are not descended into, which is most of the time saved."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _docstrings(child)
