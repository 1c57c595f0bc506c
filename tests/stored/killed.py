"""A run that ends in the midst of its second block."""

import pytest

import hessquant
from hessquant.results import SILENT


class _Killer(type(SILENT)):
    def layer(self, record):
        if record.name.startswith("model.layers.1."):
            raise KeyboardInterrupt


def quantize_once_killed(source, out, config, between=lambda: None, **more):
    """The report of the run that goes on where one was killed, after what is done between the two."""
    with pytest.raises(KeyboardInterrupt):
        hessquant.quantize(str(source), out, config, progress=_Killer(), **more)
    assert not (out / "config.json").exists()
    between()
    report = hessquant.quantize(str(source), out, config, **more)
    assert report.resumed_blocks == 1
    return report
