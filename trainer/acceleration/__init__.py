"""Speed up a step without changing its result: torch.compile by block, graph rewrites, CUDA graph capture and
replay, streams, and the policy that decides which of these a training job uses.
"""
