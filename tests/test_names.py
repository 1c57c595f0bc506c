"""Names, from the plan to the config and back, of classes whose checkpoints name weights otherwise than they do.

`python tests/architectures/cover.py` does the same for all of them.
"""

import pytest
from tests.architectures.families import OTHERS, build, text_ids, tiny
from tests.architectures.naming import config_faults

import hessquant

# Vision-language models under old names and new ones, other prefixes, other words inside a block, experts in one
# tensor, some of whose halves alternate, one matrix that loading takes apart.
CLASSES = (
    *("LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration"),
    *("Qwen3_5MoeForConditionalGeneration", "nemotron_h", "mixtral", "kimi_linear", "granitemoe", "exaone"),
)


def asked_of(plan):
    """Nothing; a block left in 16 bit; a block with groups of its own."""
    first, last = (
        [t.name for t in plan.targets if t.block == block] for block in (0, max(t.block for t in plan.targets))
    )
    return {
        "default": {},
        "excluded": {"exclude": tuple(last)},
        "overridden": {"overrides": tuple(hessquant.Override(pattern=name, group_size=16) for name in first)},
    }


def save(name, folder):
    other = next((other for other in OTHERS if other.class_name == name), None)
    config = tiny(other.model_type if other else name)
    build(config, other.class_name if other else None).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("output_format", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("name", CLASSES)
def test_every_client_reads_every_module_for_what_it_is(name, output_format, tmp_path):
    model = save(name, tmp_path / "model")
    plan = hessquant.make_plan(str(model), hessquant.Config(group_size=32, max_unquantized=1.0, format=output_format))
    for title, asked in asked_of(plan).items():
        config = hessquant.Config(group_size=32, max_unquantized=1.0, format=output_format, **asked)
        out = tmp_path / title
        hessquant.quantize(str(model), out, config, calibration=[text_ids(length=64)])
        assert config_faults(model, out) == []
        assert hessquant.inspect(out).faults == ()
