"""What makes a step fast without changing its result: torch.compile by block, graph rewrites, CUDA graph capture and
replay, streams, and the policy that decides which of them a training uses.
"""
