"""Arranges a batch of histories for a model that reads each distinct row of its tables once: `native` (C), one call.

What comes out is defined by `prepare` of models/dlrm_v4/inputs.py, which computes the same with torch on any device.
"""
