"""Windows of a stream of events, the histories of their users, and batches: what dlrm-v4 trains on."""
