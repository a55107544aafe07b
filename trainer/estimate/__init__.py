"""Hours, cost and rates of a recipe on so many GPUs, from measured figures and the network's own FLOPs."""
