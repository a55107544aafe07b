"""Networks: timm's by name, the paper's CIFAR ResNets, a small CNN for digits, and the Co-teaching pair.

The folder holds plain nn.Modules and their weight-decay groups, but no training code. It imports nothing from the
rest of the trainer, and may import nothing above trainer.distributed.
"""
