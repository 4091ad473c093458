"""MLPerf: the log of a run as the official rules want it, their checkers, convergence curves, and result folders.

Importing this needs neither torch nor mlperf-logging; writing and checking a log needs the latter
(`pip install 'recperf[mlperf]'`).
"""
