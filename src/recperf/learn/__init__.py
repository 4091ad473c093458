"""What limits the quality of a model: evidence from training, and rules that judge it. Knows tasks, no workload."""
