"""Traces of torch.profiler: record.py makes one, read.py loads any, analyse.py explains it, cut.py makes it smaller."""
