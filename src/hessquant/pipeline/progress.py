"""Progress that nobody watches."""

from hessquant.results import LayerRecord, Progress


class _Silent:
    def stage(self, name: str, steps: int) -> None: ...

    def advance(self, detail: str) -> None: ...

    def layer(self, record: LayerRecord) -> None: ...


SILENT: Progress = _Silent()
