"""Names, from the plan to the config and back, of classes whose checkpoints name weights otherwise than they do.

`python tests/architectures/renamed.py` does the same for all of them.
"""

import pytest
from tests.architectures.renamed import FORMATS, faults, save

# Vision-language models under old names and new ones, other prefixes, other words inside a block, experts in one
# tensor, one matrix that loading takes apart.
CLASSES = (
    *("LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration"),
    *("Qwen3_5MoeForConditionalGeneration", "nemotron_h", "mixtral", "kimi_linear", "granitemoe", "exaone"),
)


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_client_reads_every_module_for_what_it_is(name, output_format, tmp_path):
    model, is_renamed = save(name, tmp_path / "model")
    assert is_renamed
    assert faults(model, output_format, tmp_path) == []


@pytest.mark.parametrize("output_format", FORMATS)
def test_servers_that_put_an_encoder_into_a_module_of_theirs_read_it_for_what_it_is(output_format, tmp_path):
    model, is_renamed = save("BertModel", tmp_path / "model")
    assert not is_renamed
    assert faults(model, output_format, tmp_path) == []
