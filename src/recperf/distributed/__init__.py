"""The same models on many devices, and a plan of that before any is rented. Only this room imports torchrec."""
