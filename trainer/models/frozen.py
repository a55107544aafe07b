"""The classifier of a network, and training it alone: the other layers, the features, keep their initial weights."""

from torch import nn

from trainer.models.classifier import classifier_names


def freeze_features(network: nn.Module) -> None:
    """Exclude all parameters but the classifier's from training."""
    classifier = tuple(f"{name}." for name in classifier_names(network))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith(classifier))


def set_train_mode(module: nn.Module) -> None:
    """Put a module into train mode, except for frozen layers, whose BatchNorm and dropout stay in eval mode."""
    module.train()
    if all(parameter.requires_grad for parameter in module.parameters()):
        return
    for layer in module.modules():
        frozen = [not parameter.requires_grad for parameter in layer.parameters()]
        if frozen and all(frozen):
            layer.eval()
