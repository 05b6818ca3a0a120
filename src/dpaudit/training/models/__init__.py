"""The paper's models."""

from dpaudit.training.models._conv_net import conv_net
from dpaudit.training.models._dense import logistic_regression, mlp, purchase_mlp
from dpaudit.training.models._weight_standardized import WeightStandardizedConv2d
from dpaudit.training.models._wide_resnet import wide_resnet

__all__ = [
    "WeightStandardizedConv2d",
    "conv_net",
    "logistic_regression",
    "mlp",
    "purchase_mlp",
    "wide_resnet",
]
