"""What reaches each weight: the model's segments run on calibration batches, their inputs summed into Hessians."""
