"""The same models on several ranks, with TorchRec. Only this room imports torchrec."""
