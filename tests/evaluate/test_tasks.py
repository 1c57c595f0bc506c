"""Tasks of lm-eval: what is made of its results, and, where it is installed, a task of one's own on a decoded model."""

import importlib.util
import json
import math
import sys

import pytest
import torch
from benchmarks.loading import load_model
from tests.tiny import TINY, tokens
from transformers import LlamaConfig

import hessquant
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import ConfigError, PlanError
from hessquant.measures import TaskScore
from hessquant.models.source import resolve
from hessquant.run import whole
from hessquant.run.tasks import beside, scores_in

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is an extra")

RESULTS = {
    "results": {
        "capitals": {"alias": "capitals", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 0.25, "sample_len": 4},
        "rivers": {"alias": " - rivers", "word_perplexity,none": 12.0, "word_perplexity_stderr,none": "N/A"},
        "places": {"acc,none": math.nan, "acc_stderr,none": math.nan},
    },
    "n-shot": {"capitals": 2, "rivers": 0},
    "n-samples": {"capitals": {"original": 40, "effective": 25}, "rivers": {"original": 4, "effective": 4}},
    "higher_is_better": {"capitals": {"acc": True, "f1": True}, "rivers": {"word_perplexity": False}},
}
SCORES = [
    TaskScore("capitals", "acc", "none", 2, 25, True, 0.5, 0.1),
    TaskScore("capitals", "f1", "strict", 2, 25, True, 0.25, None),
    TaskScore("rivers", "word_perplexity", "none", 0, 4, False, 12.0, None),
    TaskScore("places", "acc", "none", None, None, None, None, None),
]
QUESTIONS = [
    {"question": f"w{n} w{n + 1}", "choices": [f"w{n + 2}", f"w{n + 3}", f"w{n + 4}"], "answer": n % 3}
    for n in range(0, 60, 3)
]
TASK = """
task: own_task
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
metadata:
  version: 1
"""


def test_the_metrics_of_a_result_are_found_with_their_errors():
    assert scores_in(RESULTS) == SCORES


def test_scores_of_the_base_model_are_beside_those_in_the_same_metric():
    base = [TaskScore("capitals", "f1", "strict", 2, 25, True, 0.75, 0.2)]
    found = list(beside(SCORES, base))
    assert (found[1].base_score, found[1].base_error, found[1].score) == (0.75, 0.2, 0.25)
    assert found[:1] + found[2:] == SCORES[:1] + SCORES[2:]


def test_without_lm_eval_it_is_said_how_to_have_it(save, text, monkeypatch):
    model = save(LlamaConfig(**TINY))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    monkeypatch.setattr(CheckpointReader, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match=r"--tasks needs lm-eval: pip install 'hessquant\[tasks\]'"):
        hessquant.evaluate(model, text=text, window_length=9, tasks=["own_task"])


def test_a_directory_of_tasks_without_a_task_is_refused(save, text, tmp_path):
    with pytest.raises(ConfigError, match=r"--task-path .* of no use without --tasks"):
        hessquant.evaluate(save(LlamaConfig(**TINY)), text=text, window_length=9, task_path=tmp_path)


@pytest.fixture
def task_path(tmp_path, monkeypatch):
    """A directory with a task of one's own, whose questions lie beside it."""
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "hf"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "own.yaml").write_text(TASK.format(data=folder / "questions.jsonl"))
    return folder


@torch.no_grad()
def accuracy(directory):
    """Share of the questions whose answer is the likeliest of the choices."""
    model, right = load_model(resolve(directory)), 0
    for each in QUESTIONS:
        ids = [int(word[1:]) for word in each["question"].split()]
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        choices = [float(logits[int(choice[1:])]) for choice in each["choices"]]
        right += choices.index(max(choices)) == each["answer"]
    return right / len(QUESTIONS)


@needs_lm_eval
@pytest.mark.filterwarnings("default")
def test_a_task_is_done_by_the_decoded_model_and_by_the_base(save, text, tmp_path, task_path):
    model, out = save(LlamaConfig(**TINY)), str(tmp_path / "out")
    hessquant.quantize(model, out, hessquant.Config(bits=2, group_size=32), calibration=[tokens(4)])
    asked = {"text": text, "window_length": 9, "tasks": ["own_task"], "task_path": task_path}
    (found,) = hessquant.evaluate(out, against=model, **asked).tasks
    assert (found.task, found.metric, found.filter, found.shots, found.samples) == ("own_task", "acc", "none", 0, 20)
    assert (found.score, found.base_score) == (accuracy(out), accuracy(model))
    for share, error in ((found.score, found.error), (found.base_score, found.base_error)):
        assert error == pytest.approx(math.sqrt(share * (1 - share) / 19))
    (alone,) = hessquant.evaluate(model, **asked).tasks
    assert (alone.score, alone.base_score) == (found.base_score, None)


@needs_lm_eval
@pytest.mark.filterwarnings("default")
def test_tasks_that_cannot_be_done_are_refused_before_a_weight_is_read(save, text, task_path, monkeypatch):
    model = save(LlamaConfig(**TINY))
    monkeypatch.setattr(CheckpointReader, "read", lambda *_: pytest.fail("read"))

    def evaluate(*tasks, path=task_path):
        hessquant.evaluate(model, text=text, window_length=9, tasks=tasks, task_path=path)

    with pytest.raises(ConfigError, match="lm-eval knows no 'no_such_task'"):
        evaluate("own_task", "no_such_task")
    with pytest.raises(ConfigError, match="no such directory"):
        evaluate("own_task", path=task_path / "gone")
    monkeypatch.setattr(whole.memory, "total_memory", lambda: whole.LIBRARIES)
    with pytest.raises(PlanError, match="--tasks needs all of the model in memory"):
        evaluate("own_task")
    (task_path / "questions.jsonl").unlink()
    with pytest.raises(ConfigError, match="--tasks own_task: lm-eval cannot make them"):
        evaluate("own_task")
