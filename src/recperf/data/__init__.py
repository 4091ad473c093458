"""Files to batches. The config of every dataset is in `config`, which imports nothing heavy."""
