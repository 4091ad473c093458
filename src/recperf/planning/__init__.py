"""Memory, time and cost of a training on many devices, predicted before it runs. Torch-free unless a dataset is read.

    from recperf.planning.devices import KNOWN, NETWORKS
    from recperf.planning.predict import predict

    plan = predict(workload.planned(config), 8, KNOWN["b200"], NETWORKS["ib400"])
    plan.parts           # seconds of each part of a step alone
    plan.memory.verdict  # whether the fullest rank fits

docs/planning.md says what is counted, what is measured and what is assumed.
"""
