"""Memory, time and cost of a training on many devices, predicted before it runs. Torch-free unless a dataset is read.

    from recperf.plan.devices import KNOWN, NETWORKS
    from recperf.plan.predict import predict
    from recperf.workloads import find

    workload = find("dlrm-v4")
    prediction = predict(workload.planned(workload.presets["mlperf"]()), 8, KNOWN["b200"], NETWORKS["ib400"])
    prediction.parts           # seconds of each part of a step alone
    prediction.memory.verdict  # whether the fullest rank fits

docs/planning.md says what is counted, what is measured and what is assumed.
"""
