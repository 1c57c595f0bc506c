"""Windows and the model's context: by what a model really takes, the same in the plan and in the run."""

import json

import pytest
import torch
import transformers
from tests.architectures.families import OTHERS, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import hessquant
from hessquant import cli
from hessquant.errors import CalibrationError
from hessquant.models.context import context_of, window_length
from hessquant.pipeline import evaluate

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
TABLES = {
    "bert": SMALL | {"max_position_embeddings": 20},
    "roberta": SMALL | {"max_position_embeddings": 20},
    "xlm-roberta": SMALL | {"max_position_embeddings": 20, "pad_token_id": 3},
    "camembert": SMALL | {"max_position_embeddings": 20},
    "mpnet": SMALL | {"max_position_embeddings": 20, "pad_token_id": 0},
    "markuplm": SMALL | {"max_position_embeddings": 20},
    "opt": SMALL | {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 20},
    "biogpt": SMALL | {"max_position_embeddings": 20},
    "gpt2": GPT | {"n_positions": 20},
    "openai-gpt": GPT | {"n_positions": 20},
}


@pytest.mark.parametrize("kind", TABLES)
def test_the_context_is_what_the_position_table_holds(kind):
    config = AutoConfig.for_model(kind, **TABLES[kind])
    limit = context_of(config).least
    model = AutoModel.from_config(config).eval()
    ids = torch.full((1, limit + 1), 7)
    with torch.no_grad():
        model(input_ids=ids[:, :-1])
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=ids)


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({"model_type": "t5"}, (None, None)),
        ({"model_type": "xlnet"}, (None, None)),
        ({"model_type": "bloom"}, (None, None)),
        ({"model_type": "bloom", "seq_length": 300}, (300, 300)),
        ({"model_type": "mpt", "max_seq_len": 300}, (300, 300)),
        (
            {"model_type": "led", "max_encoder_position_embeddings": 400, "max_decoder_position_embeddings": 90},
            (400, 90),
        ),
        ({"model_type": "whisper", "max_source_positions": 150, "max_target_positions": 44}, (150, 44)),
        ({"model_type": "bart", "max_position_embeddings": 77}, (77, 77)),
        ({"model_type": "esm", "max_position_embeddings": 66, "position_embedding_type": "rotary"}, (66, 66)),
        ({"model_type": "llama", "max_position_embeddings": -1}, (None, None)),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 60}}, (60, 60)),
    ],
    ids=str,
)
def test_limits_under_any_name(settings, context):
    assert context_of(AutoConfig.for_model(**settings)) == context


def test_the_default_window_is_the_smaller_of_2048_and_every_context():
    assert [window_length(None, *limits) for limits in ((), (None,), (512,), (9000,), (None, 300, 400))] == [
        2048, 2048, 512, 2048, 300
    ]  # fmt: skip
    assert window_length(64, 32) == 64


@pytest.fixture
def short(tmp_path):
    """A model with a context of 32, whose tokenizer has words w0 to w96; and text for it."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=32, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(tmp_path / "model")
    words = torch.randint(0, 97, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{n}" for n in words))
    return tmp_path


def test_a_short_context_is_planned_quantized_and_evaluated_by_default(short):
    model, text = str(short / "model"), str(short / "text.txt")
    config = hessquant.Config(group_size=32, num_windows=4, scale_search=False)
    plan = hessquant.make_plan(model, config, calibration=text)
    assert (plan.window_length, plan.context) == (32, 32)
    report = hessquant.quantize(model, short / "out", config, calibration=text)
    assert report.plan == plan
    assert (report.calibration.tokens, report.settings["window_length"]) == (4 * 32, 32)
    evaluation = evaluate(str(short / "out"), against=model, text=text)
    assert (evaluation.window_length, evaluation.windows) == (32, 18)


def test_a_window_beyond_the_context_is_refused_alike_everywhere(short, capsys):
    model, text, out = str(short / "model"), str(short / "text.txt"), str(short / "out")
    options = ["--group-size", "32", "--window-length", "33", "--calibration", text]
    said = []
    for command in (
        ["plan", model, *options],
        ["quantize", model, out, *options],
        ["evaluate", model, "--window-length", "33", "--text", text],
    ):
        assert cli.main(command) == 2
        said.append(capsys.readouterr().err.strip())
    assert len(set(said)) == 1
    assert "windows of 33 tokens are too long" in said[0]
    assert "take --window-length 32 or less" in said[0]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.txt", None, "there is no file"),
        ("text.csv", "w1", "cannot read text from"),
        ("empty.txt", " \n", "empty.txt holds no token"),
        ("empty.jsonl", "\n", "empty.jsonl holds no token"),
        ("bad.jsonl", '{"body": "w1"}', "bad.jsonl, line 1: found 'body'"),
        (
            "chat.jsonl",
            '{"messages": [{"role": "user", "content": "w1"}]}',
            "line 1: has 'messages', but the tokenizer",
        ),
    ],
)
def test_a_plan_refuses_what_the_beginning_shows(name, content, reason, short):
    if content is not None:
        (short / name).write_text(content)
    with pytest.raises(CalibrationError, match=reason):
        hessquant.make_plan(str(short / "model"), hessquant.Config(group_size=32), calibration=str(short / name))


def test_a_text_that_begins_with_blanks_is_planned(short):
    text = short / "late.txt"
    text.write_text("\n" * 5000 + "w1 w2")
    plan = hessquant.make_plan(str(short / "model"), hessquant.Config(group_size=32), calibration=str(text))
    assert plan.targets


def test_a_plan_reads_no_further_than_the_first_row(short):
    (short / "rows.jsonl").write_text(json.dumps({"text": "w1 w2"}) + "\nbroken")
    assert hessquant.make_plan(
        str(short / "model"), hessquant.Config(group_size=32), calibration=str(short / "rows.jsonl")
    ).targets


def test_inputs_that_the_forward_pass_does_not_name_are_refused(tmp_path):
    other = next(other for other in OTHERS if other.class_name == "LlavaForConditionalGeneration")
    config = tiny(other.model_type)
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    inputs = other.image_inputs(config)
    misspelt = {("pixel_value" if name == "pixel_values" else name): value for name, value in inputs.items()}
    settings = hessquant.Config(group_size=32, max_unquantized=1)
    with pytest.raises(
        CalibrationError, match="calibration sample 1: 'pixel_value' is no input that the model's forward"
    ):
        hessquant.make_plan(str(tmp_path / "model"), settings, calibration=[inputs, misspelt])
    assert hessquant.make_plan(str(tmp_path / "model"), settings, calibration=[inputs]).targets
