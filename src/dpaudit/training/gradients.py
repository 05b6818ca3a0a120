"""Per-example gradients, clipped and summed: the inner loop of DP-SGD.

Clipping needs the norms of the gradients and a weighted sum of them, not the gradients themselves. The
per-example gradient of the weight of a linear layer is the outer product of the layer's input a and the
gradient g at its output. Its norm is |g| |a| (Goodfellow 2015, arXiv:1510.01799), and a weighted sum of such
gradients is one matrix product, as in training without privacy (Bu et al. 2022, arXiv:2210.00038). With
several augmentations k per example, the gradient is a sum of outer products, with squared norm
sum_kl (g_k . g_l) (a_k . a_l). ``Rows`` of linear layers are therefore stored as products of two small
matrices. All other models use ``torch.func``: vmap(grad), one chunk of examples at a time.

Flat vectors of parameters and gradients are always in the order of ``named_parameters()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from dpaudit import _validate
from dpaudit.errors import InputError

__all__ = [
    "Batch",
    "DenseRows",
    "Loss",
    "Rows",
    "cross_entropy",
    "flat_parameters",
    "num_parameters",
    "per_example",
    "set_flat_gradient",
]

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function from a batch of outputs and targets to one loss per row."""

# Smaller chunks call torch more often (64 takes a tenth longer on a ConvNet); larger ones need more memory.
_MAX_CHUNK = 128
_MAX_CHUNK_ENTRIES = 2**27  # gradient entries of a chunk: half a gigabyte
# Elementwise modules. Any other module might make one example depend on another, and then the norms from
# book-keeping would be wrong.
ENTRYWISE = (
    nn.ELU,
    nn.GELU,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.ReLU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softplus,
    nn.Tanh,
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of some examples.

    With ``multiplicity`` > 1 every example has that many consecutive inputs, its augmentations. Its gradient
    is the mean of theirs and is clipped once (De et al. 2022, arXiv:2204.13650).
    """

    inputs: Tensor
    targets: Tensor
    multiplicity: int = 1

    def __post_init__(self) -> None:
        _validate.integer("multiplicity", self.multiplicity)
        if len(self.inputs) != len(self.targets) * self.multiplicity:
            raise InputError(
                f"Each target needs {self.multiplicity} inputs, got {len(self.inputs)} inputs and "
                f"{len(self.targets)} targets."
            )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def views(self) -> Tensor:
        """The inputs, with shape examples x augmentations x input shape."""
        return self.inputs.view(len(self), self.multiplicity, *self.inputs.shape[1:])


def per_example(model: nn.Module, loss: Loss, batch: Batch) -> Iterable[Rows]:
    """Return per-example gradients: by book-keeping for linear layers, by chunked vmap otherwise."""
    if len(batch) == 0:  # happens under Poisson sampling
        return ()
    if is_plain_linear(model):
        rows = book_keeping_rows(model, loss, batch)
        if rows is not None:
            return (rows,)
    return vmap_rows(model, loss, batch)


def add_clipped(rows: Iterable[Rows], max_grad_norm: float, out: Tensor) -> Tensor:
    """Add the clipped gradients to ``out``; return their norms before clipping."""
    norms = []
    for chunk in rows:
        norms.append(chunk.norms())
        chunk.add_weighted(clip_weights(norms[-1], max_grad_norm), out)
    return norms[0] if len(norms) == 1 else torch.cat([out.new_zeros(0), *norms])


def clip_weights(norms: Tensor, max_grad_norm: float) -> Tensor:
    """Return the clipping factor of each gradient: min(1, max_grad_norm / norm).

    A gradient with a non-finite norm gets weight zero: it cannot be clipped and must not be released.

    >>> import torch
    >>> clip_weights(torch.tensor([0.5, 4.0, 0.0, float("nan")]), max_grad_norm=1.0)
    tensor([1.0000, 0.2500, 1.0000, 0.0000])
    """
    return (max_grad_norm / norms).clamp_(max=1.0).nan_to_num_(nan=0.0)  # c / inf is zero already


class Rows(Protocol):
    """Per-example gradients of some examples."""

    def norms(self) -> Tensor:
        """Return the Euclidean norm of each gradient, before clipping."""
        ...

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add ``sum_i weights[i] * gradient[i]`` to the flat vector ``out``.

        A weight of zero omits the gradient, even if it is not finite.
        """
        ...


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Explicit gradients: for each parameter a tensor with shape examples x parameter shape."""

    gradients: Sequence[Tensor]

    def norms(self) -> Tensor:
        norms_of_leaves = [torch.linalg.vector_norm(leaf.flatten(1), dim=1) for leaf in self.gradients]
        return torch.stack(norms_of_leaves).square().sum(dim=0).sqrt()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        sizes = [leaf[0].numel() for leaf in self.gradients]
        for leaf, piece in zip(self.gradients, torch.split_with_sizes(out, sizes), strict=True):
            piece.add_(weights @ without_skipped(leaf.flatten(1), weights))


def without_skipped(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the rows, with zeros where the weight is zero: 0 * inf is not 0."""
    if bool(weights.all()):
        return rows
    skipped = (weights == 0).view(-1, *[1] * (rows.dim() - 1))
    return rows.masked_fill(skipped, 0.0)


def vmap_rows(model: nn.Module, loss: Loss, batch: Batch) -> Iterator[DenseRows]:
    """Yield the gradients of a batch in chunks, so that they are never all in memory."""
    refuse_batch_norm(model)
    chunk = max(1, min(_MAX_CHUNK // batch.multiplicity, _MAX_CHUNK_ENTRIES // num_parameters(model)))
    parameters = {name: value.detach() for name, value in trainable(model).items()}

    def loss_of_one(values: dict[str, Tensor], views: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, values, (views,))
        return checked(loss, outputs, target.expand(len(views), *target.shape)).mean()

    gradients: Any = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    views = batch.views
    for first in range(0, len(batch), chunk):
        rows = slice(first, first + chunk)
        yield DenseRows(list(gradients(parameters, views[rows], batch.targets[rows]).values()))


def refuse_batch_norm(model: nn.Module) -> None:
    """Raise if the outputs for one example depend on the others in its batch."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"The model mixes the examples of a batch: {name or 'it'} is a {type(module).__name__}. Use "
                "GroupNorm or LayerNorm."
            )


def book_keeping_rows(model: nn.Module, loss: Loss, batch: Batch) -> LinearRows | None:
    """Return the gradients of a batch; None if the input of a layer is not a batch of feature vectors."""
    outputs, calls = _forward(model, batch.inputs)
    if any(inputs.dim() != 2 for _, inputs, _ in calls):
        return None
    losses = checked(loss, outputs, batch.targets.repeat_interleave(batch.multiplicity, dim=0))
    total = losses.sum() / batch.multiplicity
    gradients = torch.autograd.grad(total, [output for _, _, output in calls])
    shape = (len(batch), batch.multiplicity, -1)
    layers = [
        _LinearGradients(layer, inputs.detach().view(shape), gradient.view(shape))
        for (layer, inputs, _), gradient in zip(calls, gradients, strict=True)
    ]
    return LinearRows(list(trainable(model).values()), layers)


def _forward(model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[tuple[nn.Linear, Tensor, Tensor]]]:
    """Return the outputs of the model, and its trainable linear layers with their inputs and outputs."""
    calls = []
    values = inputs
    for leaf in _leaves(model):
        before, values = values, leaf(values)
        if isinstance(leaf, nn.Linear) and any(value.requires_grad for value in leaf.parameters()):
            calls.append((leaf, before, values))
    return values, calls


@dataclass(frozen=True, eq=False)
class LinearRows:
    """Gradients of a batch, stored as inputs and output gradients of each linear layer."""

    parameters: Sequence[nn.Parameter]
    layers: Sequence[_LinearGradients]

    def norms(self) -> Tensor:
        return torch.stack([layer.squared_norms() for layer in self.layers]).sum(dim=0).sqrt()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        leaves = torch.split_with_sizes(out, [value.numel() for value in self.parameters])
        pieces = {id(value): leaf.view_as(value) for value, leaf in zip(self.parameters, leaves, strict=True)}
        for layer in self.layers:
            layer.add_weighted(weights, pieces)


@dataclass(frozen=True, eq=False)
class _LinearGradients:
    """Inputs and output gradients of one linear layer, with shape examples x augmentations x features."""

    layer: nn.Linear
    inputs: Tensor
    gradients: Tensor

    @property
    def has_bias(self) -> bool:
        return self.layer.bias is not None and self.layer.bias.requires_grad

    def squared_norms(self) -> Tensor:
        outputs = _gram(self.gradients)
        total = torch.zeros_like(outputs)
        if self.layer.weight.requires_grad:
            total += outputs * _gram(self.inputs)
        if self.has_bias:
            total += outputs
        return total.sum(dim=(1, 2)).clamp(min=0.0)  # rounding errors may make it negative

    def add_weighted(self, weights: Tensor, pieces: dict[int, Tensor]) -> None:
        gradients = without_skipped(self.gradients, weights) * weights[:, None, None]
        if self.layer.weight.requires_grad:
            inputs = without_skipped(self.inputs, weights)
            pieces[id(self.layer.weight)].addmm_(gradients.flatten(0, 1).T, inputs.flatten(0, 1))
        if self.has_bias:
            pieces[id(self.layer.bias)].add_(gradients.sum(dim=(0, 1)))


def _gram(rows: Tensor) -> Tensor:
    if rows.shape[1] == 1:
        return rows.square().sum(dim=2, keepdim=True)
    return rows @ rows.mT


def is_plain_linear(model: nn.Module) -> bool:
    """Return whether the model is a sequence of untied linear layers and elementwise functions."""
    leaves = chain(model)
    return leaves is not None and all(map(_is_known, leaves))


def chain(model: nn.Module) -> list[nn.Module] | None:
    """Return the modules in order of application; None if there are hooks or shared weights."""
    leaves = _leaves(model)
    weights = [id(value) for leaf in leaves for value in leaf.parameters(recurse=False)]
    # hooks may change inputs or outputs, as torch's older weight norm does
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return None if has_hooks or len(weights) != len(set(weights)) else leaves


def _leaves(module: nn.Module) -> list[nn.Module]:
    if type(module) is nn.Sequential:
        return [leaf for child in module for leaf in _leaves(child)]
    return [module]


def _is_known(leaf: nn.Module) -> bool:
    if type(leaf) is nn.Flatten:
        return (leaf.start_dim, leaf.end_dim) == (1, -1)
    if getattr(leaf, "inplace", False):  # overwrites the output whose gradient is needed
        return False
    return type(leaf) in (nn.Linear, nn.Dropout, *ENTRYWISE)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy loss of each row of logits."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def checked(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses; raise if they are already averaged or summed."""
    losses = loss(outputs, targets)
    if losses.shape != targets.shape[:1]:
        raise InputError(
            f"The loss must have shape {tuple(targets.shape[:1])}, one number per example, got "
            f"{tuple(losses.shape)}; use reduction='none'."
        )
    return losses


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, tied parameters only once."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise InputError("The model has no parameter that requires a gradient.")
    return parameters


def num_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters, which is the length of a flat vector."""
    return sum(value.numel() for value in trainable(model).values())


def flat_zeros(model: nn.Module) -> Tensor:
    """Return a flat vector of zeros for the parameters of the model."""
    parameters = list(trainable(model).values())
    first = parameters[0]
    return torch.zeros(sum(value.numel() for value in parameters), dtype=first.dtype, device=first.device)


def flat_parameters(model: nn.Module) -> Tensor:
    """Return a copy of all trainable parameters as a flat vector."""
    return torch.cat([value.detach().reshape(-1) for value in trainable(model).values()])


def set_flat_gradient(model: nn.Module, gradient: Tensor) -> None:
    """Set the ``grad`` of every parameter to its part of ``gradient``, without copying."""
    parameters = list(trainable(model).values())
    pieces = torch.split_with_sizes(gradient, [value.numel() for value in parameters])
    for value, piece in zip(parameters, pieces, strict=True):
        value.grad = piece.view_as(value)
