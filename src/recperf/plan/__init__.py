"""Memory, time and cost of a training on many devices, counted before it runs. Torch-free but for reading a dataset.

    from recperf.plan.devices import KNOWN, NETWORKS
    from recperf.plan.predict import predict

    found = predict(config, 8, KNOWN["b200"], NETWORKS["ib400"])
    found.parts          # seconds of each part by itself
    found.memory.verdict # does the fullest rank fit?

docs/planning.md says what is counted, what is measured and what is assumed.
"""
