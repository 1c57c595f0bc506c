import pytest

from hessquant.planning.servers import verdicts

DEFAULTS = {
    "bits": 4, "group_size": 64, "symmetric": True, "shapes": frozenset({(576, 1536)}), "transposed": False,
}  # fmt: skip
CPU, GPU, TRANSFORMERS = "vLLM 0.32 (CPU)", "vLLM (GPU, Marlin)", "transformers 5.24"


def opens(**changes):
    return {verdict.server: verdict.opens for verdict in verdicts("gptq", **(DEFAULTS | changes))}


@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
def test_symmetric_four_bit_opens_where_it_was_measured(group_size):
    found = opens(group_size=group_size)
    assert found[CPU] == found[GPU] == found[TRANSFORMERS] == "yes"
    assert found["llama.cpp"] == "no"
    assert found["SGLang 0.5"] == "unknown"


@pytest.mark.parametrize(
    ("changes", "cpu", "gpu"),
    [
        ({"symmetric": False}, "no", "no"),
        ({"bits": 3}, "no", "no"),
        ({"bits": 2}, "no", "no"),
        ({"bits": 8}, "no", "yes"),
        ({"group_size": 16}, "no", "no"),
        ({"shapes": frozenset({(576, 1536), (48, 64)})}, "no", "yes"),
    ],
)
def test_what_vllm_refuses(changes, cpu, gpu):
    found = opens(**changes)
    assert (found[CPU], found[GPU], found[TRANSFORMERS]) == (cpu, gpu, "yes")


def test_transposed_weights_were_never_tried():
    found = opens(transposed=True)
    assert found[CPU] == found[TRANSFORMERS] == "unknown"


def test_refusals_say_why_and_how_it_is_known():
    refused = {verdict.server: verdict for verdict in verdicts("gptq", **(DEFAULTS | {"bits": 3, "symmetric": False}))}
    assert refused[CPU].reason == "takes 4 bits, not 3; takes symmetric weights only in this format"
    assert refused[CPU].basis == "measured"
    assert refused[GPU].basis == "documented"
    assert refused["SGLang 0.5"].basis == "not run"
