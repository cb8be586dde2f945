"""Steps of workers: which rows they compute on and how they push gradients."""
