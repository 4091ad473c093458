"""Traces of torch.profiler: record one, read any, analyse it, cut it to a size, merge those of several ranks."""
