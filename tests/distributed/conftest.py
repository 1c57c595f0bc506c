import pytest
from tests.distributed.harness import CONFIGS, make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of each kind, by its kind."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, folder / kind) for kind in CONFIGS}
