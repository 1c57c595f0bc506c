import sys
from types import ModuleType

import pytest

import hessquant


class FakePipeline(ModuleType):
    """Stands in for `hessquant.pipeline`: keeps what it was asked and gives made-up records."""

    def __init__(self, plan, run_report, export_report, evaluation, inspection):
        super().__init__("hessquant.pipeline")
        self.plan, self.run_report, self.export_report = plan, run_report, export_report
        self.evaluation, self.inspection = evaluation, inspection
        self.asked = {}
        self.error = None

    def _ask(self, **asked):
        self.asked = asked
        sys.stdout.write("a library talks\n")
        if self.error is not None:
            raise self.error

    def make_plan(self, model, config=None, *, calibration="builtin", processes=None, progress=None):
        self._ask(model=model, config=config, calibration=calibration, processes=processes)
        return self.plan

    def quantize(
        self,
        model,
        out,
        config=None,
        *,
        calibration="builtin",
        run_dir=None,
        keep_run=False,
        progress=None,
    ):
        progress.plan(self.plan)
        progress.stage("quantize", len(self.run_report.layers))
        self._ask(model=model, out=out, config=config, calibration=calibration, run_dir=run_dir, keep_run=keep_run)
        return self.run_report

    def export(self, checkpoint, out, config, *, base=None, progress=None):
        progress.plan(self.plan)
        progress.stage("write", 1)
        self._ask(checkpoint=checkpoint, out=out, config=config, base=base)
        return self.export_report

    def evaluate(
        self,
        model,
        *,
        against=None,
        text=None,
        num_windows=None,
        window_length=None,
        config=None,
        progress=None,
        **trials,
    ):
        asked = {"model": model, "against": against, "text": text, "num_windows": num_windows}
        self._ask(**asked, window_length=window_length, config=config, **trials)
        return self.evaluation

    def inspect(self, directory, *, trust_remote_code=False):
        self._ask(directory=directory)
        return self.inspection


@pytest.fixture
def pipeline(monkeypatch, plan, run_report, export_report, evaluation, inspection):
    fake = FakePipeline(plan, run_report, export_report, evaluation, inspection)
    monkeypatch.setitem(sys.modules, "hessquant.pipeline", fake)
    monkeypatch.setattr(hessquant, "pipeline", fake, raising=False)
    return fake
