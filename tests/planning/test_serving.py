import re

import pytest

from hessquant.config import CLIENTS, Config
from hessquant.errors import ConfigError, ServeError
from hessquant.planning import make_plan
from hessquant.planning.composition import PlannedCheckpoint
from hessquant.planning.serving import refuse_unserved, remedies
from hessquant.records import GridSpec, Location, ServerVerdict, Target

BLOCKS = ("h.0", "h.1")


def weights(count=2, rows=64, columns=128, transposed=False, **settings):
    grid = GridSpec(**({"bits": 4, "group_size": 64} | settings))
    return tuple(
        Target(f"h.{n}.w.weight", (Location("w", rows),), n, rows, columns, grid, transposed, f"h.{n}.w.weight")
        for n in range(count)
    )


def checkpoint(planned):
    return PlannedCheckpoint(planned, BLOCKS)


def test_a_plan_that_the_client_opens_passes(llama):
    plan = make_plan(*llama(), Config(group_size=64, serve=("vllm", "transformers")))
    assert {verdict.opens for verdict in plan.servers if verdict.is_named(("vllm", "transformers"))} == {"yes"}


def test_a_plan_that_the_client_does_not_open_is_refused_with_reason_and_way_out(llama):
    with pytest.raises(ServeError) as caught:
        make_plan(*llama(), Config(symmetric=False, group_size=64, serve=("vllm-cpu",)))
    assert str(caught.value).splitlines() == [
        "not every client named by --serve opens gptq as planned:",
        "  vLLM 0.32 (CPU): takes symmetric weights only in this format, not asymmetric ones of 4 bits",
        "    what to change: no --asymmetric or --format compressed-tensors",
    ]


def test_clients_that_were_not_named_do_not_count(llama):
    make_plan(*llama(), Config(symmetric=False, group_size=64, serve=("transformers",)))
    make_plan(*llama(), Config(symmetric=False, group_size=64))


def test_what_is_not_known_passes(llama):
    plan = make_plan(*llama(hidden_size=64), Config(group_size=64, serve=("sglang",)))
    assert {verdict.client: verdict.opens for verdict in plan.servers}["sglang"] == "unknown"


def test_a_client_without_its_device_must_open_on_each_and_the_message_says_how_to_name_one(llama):
    with pytest.raises(ServeError) as caught:
        make_plan(*llama(), Config(bits=8, group_size=64, serve=("vllm",)))
    assert "vLLM 0.32 (CPU): takes 4 bits, not 8" in str(caught.value)
    assert "(GPU):" not in str(caught.value)
    assert str(caught.value).splitlines()[-1] == "Or name only clients that will serve it: --serve vllm-gpu"
    make_plan(*llama(), Config(bits=8, group_size=64, serve=("vllm-gpu",)))


def test_every_refused_client_is_listed(llama):
    with pytest.raises(ServeError) as caught:
        make_plan(*llama(), Config(bits=3, group_size=32, serve=("vllm", "llama.cpp", "transformers")))
    assert re.findall(r"^  (\S.*?): ", str(caught.value), re.MULTILINE) == [
        "vLLM 0.32 (CPU)", "vLLM 0.32 (GPU)", "llama.cpp",
    ]  # fmt: skip
    assert str(caught.value).splitlines()[-1].endswith("--serve transformers")


@pytest.mark.parametrize("name", CLIENTS)
def test_known_names_are_taken(name):
    assert Config(serve=(name,)).serve == (name,)


@pytest.mark.parametrize("names", [("vlm",), ("vllm", "ollama"), ("vLLM",), ("",)])
def test_an_unknown_name_is_refused_with_those_that_are_known(names):
    with pytest.raises(ConfigError, match=rf"serve names {names[-1]!r}; known clients are {', '.join(CLIENTS)}"):
        Config(serve=names)


# The changes that a refusal offers.


@pytest.mark.parametrize(
    ("client", "output_format", "planned", "expected"),
    [
        ("vllm-cpu", "gptq", {"symmetric": False}, ["no --asymmetric", "--format compressed-tensors"]),
        ("vllm-cpu", "gptq", {"bits": 3}, ["--bits 4"]),
        ("vllm-gpu", "gptq", {"bits": 3}, ["--bits 4"]),
        ("vllm-cpu", "gptq", {"group_size": 16}, ["--group-size 32", "--format compressed-tensors"]),
        ("vllm-gpu", "gptq", {"group_size": 16}, ["--group-size 32"]),
        # One group per row is far from two inputs per group, whatever the numbers say.
        ("vllm-gpu", "gptq", {"group_size": 2}, ["--group-size 32"]),
        # What would leave the client unknown is no way out.
        ("vllm-cpu", "gptq", {"bits": 8, "transposed": True}, []),
        ("vllm-cpu", "gptq", {"bits": 3, "symmetric": False}, ["no --asymmetric with --bits 4"]),
        ("vllm-cpu", "gptq", {"rows": 48}, []),
    ],
)
def test_the_fewest_changes_that_help_are_offered(client, output_format, planned, expected):
    # Formats are tried too, so the start of the list is what counts where it may grow with them.
    assert remedies(client, output_format, checkpoint(weights(**planned)))[: len(expected) or None] == expected


def test_a_group_size_is_offered_only_where_it_divides_the_inputs():
    assert remedies("vllm-gpu", "gptq", checkpoint(weights(columns=208, group_size=16)))[0] == "--group-size -1"


def test_a_group_size_must_divide_the_inputs_in_formats_without_a_dialect_too():
    assert remedies("llama.cpp", "gguf", checkpoint(weights(columns=160, group_size=48)))[0] == "--group-size 32"


def test_a_format_is_offered_only_where_it_holds_the_weights():
    # Zeros of 4 bits fill whole words only where outputs are a multiple of 8.
    assert "--format compressed-tensors" in remedies("transformers", "gptq", checkpoint(weights(group_size=2)))
    asymmetric = weights(rows=36, group_size=2, symmetric=False)
    assert "--format compressed-tensors" not in remedies("transformers", "gptq", checkpoint(asymmetric))


def test_an_offer_for_a_mixed_plan_says_that_it_is_for_all_weights():
    mixed = (*weights(1), *weights(2, bits=8)[1:])
    assert remedies("vllm-cpu", "gptq", checkpoint(mixed))[0] == "--bits 4 for every weight"


def test_every_kind_of_block_counts_for_an_offer():
    mixed = (*weights(1, columns=208, group_size=16), *weights(2, columns=128, group_size=16)[1:])
    for planned in (mixed, mixed[::-1]):
        assert remedies("vllm-gpu", "gptq", checkpoint(planned))[0] == "--group-size -1"


def test_a_block_that_differs_in_its_storage_only_counts_too():
    mixed = (*weights(1, bits=8, transposed=True), *weights(2, bits=8)[1:])
    assert remedies("vllm-cpu", "gptq", checkpoint(mixed)) == []


def test_where_no_change_helps_the_message_says_so():
    planned = weights(rows=48)
    verdict = ServerVerdict("S", "no", "because", "measured", "vllm-cpu")
    with pytest.raises(ServeError, match="none is known; leave weights out with --exclude"):
        refuse_unserved(("vllm",), (verdict,), "gptq", checkpoint(planned))
