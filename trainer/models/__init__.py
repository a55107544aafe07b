"""Networks: timm's by name, the paper's CIFAR ResNets, a small CNN for digits, and the Co-teaching pair.

Plain nn.Modules and their weight-decay groups, with no training code. Of the trainer it imports nothing, and it may
import nothing above trainer.distributed.
"""
