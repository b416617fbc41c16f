"""Files of datasets: arrays, metrics and indexes."""
