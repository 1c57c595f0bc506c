import logging

import pytest
from transformers.utils import logging as hf_logging

from hessquant.models.library import quiet


@pytest.fixture
def loud():
    """Warnings and progress bars on, whatever an earlier test left."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_warning()
    hf_logging.enable_progress_bar()
    yield
    hf_logging.set_verbosity(verbosity)
    if not bars:
        hf_logging.disable_progress_bar()


def heard():
    return logging.getLogger("transformers").isEnabledFor(logging.WARNING), hf_logging.is_progress_bar_enabled()


@pytest.mark.usefixtures("loud")
def test_quiet_silences_warnings_and_bars():
    with quiet():
        assert heard() == (False, False)
    assert heard() == (True, True)


def fail_quietly():
    with quiet():
        raise RuntimeError("inside")


@pytest.mark.usefixtures("loud")
def test_an_error_inside_ends_the_quiet():
    with pytest.raises(RuntimeError, match="inside"):
        fail_quietly()
    assert heard() == (True, True)
