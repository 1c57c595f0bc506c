"""A representative dozen of the families that `make coverage` goes through, and the page that it writes."""

import re

import pytest
from tests.architectures.cover import PAGE, cover
from tests.architectures.families import CAUSAL_LM, NOT_BUILT
from tests.architectures.others import OTHERS

DOZEN = (
    "llama",
    "gpt2",  # [inputs, outputs], several projections in one
    "bloom",
    "falcon",  # attention and MLP see one input
    "mixtral",  # stacked in the model, one tensor per expert in the checkpoint
    "qwen3_moe",
    "gpt_oss",  # stacked in both, [inputs, outputs], alternating rows
    "granitemoe",  # stacked in both, under another name
    "llama4_text",  # all experts multiplied at once
    "deepseek_v3",
    "mamba2",
    "jamba",
    "nomic_bert:NomicBertModel",  # one tensor in the checkpoint, several in the model
    "albert:AlbertModel",  # looped
    "t5:T5ForConditionalGeneration",
)
_KNOWN = {f"{other.model_type}:{other.class_name}": other for other in OTHERS}


@pytest.mark.parametrize("family", DOZEN)
def test_a_family_is_quantized_whole_better_than_rounding_and_opens_again(family, tmp_path):
    row = cover(_KNOWN.get(family, family), tmp_path)
    assert row.left < 0.5
    assert (row.experts > 0) == (
        family in ("mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "llama4_text", "deepseek_v3", "jamba")
    )


def test_the_page_has_a_line_for_every_family():
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| ([\w.-]+)", text, flags=re.MULTILINE))
    assert not set(CAUSAL_LM) - named
    assert len(set(CAUSAL_LM) - set(NOT_BUILT)) > 100
