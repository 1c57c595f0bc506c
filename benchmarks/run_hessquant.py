"""Hessquant on one model: Config's defaults with another group size and width."""

import hessquant
import job
from hessquant.models.source import resolve
from loading import load_model


def quantize(arguments):
    windows = job.calibration_windows(arguments)
    config = hessquant.Config(
        bits=arguments.bits,
        group_size=arguments.group_size,
        num_windows=len(windows),
        window_length=windows.shape[1],
    )
    hessquant.quantize(str(arguments.model), str(arguments.out), config=config, calibration=windows)


def decode(arguments):
    load_model(resolve(str(arguments.model))).save_pretrained(arguments.out)


if __name__ == "__main__":
    job.main(quantize, decode, "hessquant")
