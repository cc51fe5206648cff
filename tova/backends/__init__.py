"""What computes the products around a decision: torch, a team of threads, or Triton.

A replay asks a backend for the logits of a chunk, a scan for its decision, and the backend to mix the values under it.
"""
