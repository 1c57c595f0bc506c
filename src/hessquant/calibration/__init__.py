"""What the calibration is: text and samples of other inputs -> windows -> batches."""
