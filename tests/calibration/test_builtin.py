import ast
import random
import sys

import numpy as np
import pytest
import torch

from hessquant.calibration import builtin
from hessquant.calibration.builtin import builtin_text, is_held_out


def paragraphs(text):
    return {" ".join(paragraph.split()) for paragraph in text.split("\n\n")} - {""}


def test_calibration_part_is_enough_for_the_default_windows():
    assert len(builtin_text("calibration")) > 5 * 128 * 2048  # five characters per token, and tokens have about four


def test_the_two_parts_share_no_paragraph():
    calibration, held_out = paragraphs(builtin_text("calibration")), paragraphs(builtin_text("held-out"))
    assert len(held_out) > 1000
    assert calibration.isdisjoint(held_out)


def test_about_a_tenth_of_the_documents_is_held_out():
    share = sum(is_held_out(f"module{n}.py") for n in range(2000)) / 2000
    assert 0.08 < share < 0.12


def test_seed_orders_the_calibration_documents_and_only_those():
    assert builtin_text("calibration", 1) == builtin_text("calibration", 1)
    assert builtin_text("calibration", 1) != builtin_text("calibration", 2)
    assert paragraphs(builtin_text("calibration", 1)) == paragraphs(builtin_text("calibration", 2))
    assert builtin_text("held-out", 1) == builtin_text("held-out", 2)


def test_random_states_of_the_caller_are_untouched():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    builtin_text("calibration", 5)
    assert states() == before


def test_library_code_is_parsed_and_never_run(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text('"""Prose."""\nimport absent_module\nraise SystemExit\n')
    monkeypatch.setattr(builtin.sysconfig, "get_path", lambda name: str(tmp_path))
    before = set(sys.modules)
    assert dict(builtin._all_documents())["module.py"] == "Prose."
    assert set(sys.modules) == before


@pytest.mark.parametrize("folder", ["test", "pkg/tests", "site-packages/pkg", "idlelib", "encodings"])
def test_code_that_is_no_library_prose_is_left_out(tmp_path, monkeypatch, folder):
    for path in (tmp_path / "kept.py", tmp_path / folder / "left_out.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Text of {path.name}."""\n')
    monkeypatch.setattr(builtin.sysconfig, "get_path", lambda name: str(tmp_path))
    names = [name for name, _ in builtin._all_documents() if not name.startswith("topics/")]
    assert names == ["kept.py"]


def test_docstrings_come_in_source_order_and_from_nested_code():
    source = (
        '"""One."""\ndef f():\n  """Two."""\nif True:\n  class C:\n    """Three."""\n    def m(self): """Four."""\n'
    )
    assert list(builtin._docstrings(ast.parse(source))) == ["One.", "Two.", "Three.", "Four."]
