"""Batch normalization over the joined batch of all ranks; must not know how data travels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from horovod.common import ops
from horovod.common.ops import Call, synchronize
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.differentiable import allreduce
from horovod.torch.ops import Sum, submit
from horovod.torch.reducer import weight_of
from horovod.torch.views import TO_ENGINE


class SyncBatchNorm(_BatchNorm):
    """Normalizes as `torch.nn.BatchNorm1d` to ``3d`` would on the batches of all ranks, joined.

    In training mode, mean and variance are those of all members' values together, however many each
    has; a member may also have no rows. Outputs, running statistics and input gradients are those
    of the joined batch. Gradients of weight and bias are this rank's terms, which an averaging
    optimizer makes those of the mean of the ranks' losses, or of their mean by ``optimizer.weight``
    (which a layer with ``affine=False`` can't see: scale the loss instead). In evaluation mode, and
    for a set of one rank, it is ordinary batch normalization without communication.

    In training mode forward blocks until every member has called it, and backward until every
    member has come to it: all members run the same layers, in the same order, on one thread. Costs
    one exchange of ``2 * num_features + 1`` numbers forward and one of ``2 * num_features``
    backward. Differentiable any number of times. float16 and bfloat16 are computed in float32.

    Args:
        num_features: C of an input of shape (N, C) or (N, C, ...).
        eps: added to the variance.
        momentum: weight of the newest statistics in the running ones; None for their plain mean.
        affine: learns a weight and a bias a channel.
        track_running_stats: keeps running statistics for evaluation. Without them, evaluation uses
            those of this rank's own batch.
        process_set: whose batches are joined.

    Raises:
        ValueError: in forward, on every member: the joined batch has fewer than 2 values a channel.
            On this rank, while the others get a HorovodInternalError: the input isn't a
            floating-point tensor of that shape.
        HorovodInternalError: in forward or backward: members differ in `num_features`, or a peer
            is lost.

    Source: pairwise combination of means and variances by Chan, Golub and LeVeque, Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _check_input(self, input: torch.Tensor) -> None:
        self._check_input_dim(input)
        if not input.is_floating_point():
            raise ValueError(f"expected a floating-point input, not {input.dtype}")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels (got {input.shape[1]})")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes (N, C, ...); the result has the same shape and type."""
        if not self.training or ops.members(self.process_set) == 1:
            return super().forward(input)
        mean, variance, count = _Statistics.apply(input, self)  # type: ignore[no-untyped-call]
        if count < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {count} over all "
                f"ranks, and input size {tuple(input.shape)} here"
            )
        if self.track_running_stats:
            self._update(mean, variance * (count / (count - 1)))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight.to(scale.dtype)
        output = (input - _spread(mean, input)) * _spread(scale, input)
        if self.bias is not None:
            output = output + _spread(self.bias.to(scale.dtype), input)
        return output.to(input.dtype)

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
        newest = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            newest = 1.0 / float(self.num_batches_tracked) if newest is None else newest
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.copy_(torch.lerp(running.to(new.dtype), new, newest or 0.0))

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replaces every batch normalization in a model by a synchronized one.

        Parameters and running statistics are taken over, not copied, so that optimizers made before
        go on working; hooks are not. Local: no rank waits.

        Args:
            module: the model; changed in place.
            process_set: for the new layers.

        Returns:
            The model, or the new layer if `module` itself is a batch normalization.

        Raises:
            ValueError: a lazy layer has not seen its first input yet.
        """
        # One layer in several places stays one.
        converted: dict[torch.nn.Module, SyncBatchNorm] = {}
        for path, layer in list(module.named_modules(remove_duplicate=False)):
            if not isinstance(layer, _BatchNorm) or isinstance(layer, cls):
                continue
            if layer not in converted:
                converted[layer] = cls._of(layer, process_set)
            if not path:
                return converted[layer]
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, converted[layer])
        return module

    @classmethod
    def _of(cls, layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin):
            raise ValueError("a lazy batch normalization can be converted after its first use")
        result = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_set=process_set,
        )
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(result, name, getattr(layer, name))
        result.train(layer.training)
        return result


class _Statistics(torch.autograd.Function):
    """Mean and (biased) variance of each channel of the joined batch, and its values a channel.

    All members have the same results, so the gradient of an input takes the sum over members of
    those of the results.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, layer: SyncBatchNorm
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        features, process_set = layer.num_features, layer.process_set
        # The name is the same for all layers of a width: only one call at a time is under way.
        name = f"sync_batch_norm.{features}"
        with Call(ops.ALLGATHER, name, process_set) as call:
            layer._check_input(input)
            handle = submit(call, (_summary(input)[None],), TO_ENGINE)
        rows: torch.Tensor = synchronize(handle)
        counts, means, deviations = torch.split(rows, [1, features, features], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (deviations + counts * (means - mean).square()).sum(0) / count
        kind = _computed_in(input)
        mean, variance = mean.to(input.device, kind), variance.to(input.device, kind)
        ctx.save_for_backward(input, mean)
        ctx.name, ctx.process_set, ctx.count = name, process_set, int(count)
        ctx.learned = layer.weight
        return mean, variance, ctx.count

    @staticmethod
    def backward(ctx: Any, of_mean: torch.Tensor, of_variance: torch.Tensor, _: None) -> Any:
        input, mean = ctx.saved_tensors
        terms = torch.stack([of_mean, of_variance])
        weight = weight_of(ctx.learned)
        if weight is not None:  # the optimizer will weight what comes out of here
            terms = terms * weight if weight else torch.zeros_like(terms)
        sums = allreduce(terms, name=ctx.name, op=Sum, process_set=ctx.process_set)
        if weight:
            sums = sums / weight
        of_mean, of_variance = (_spread(one, input) for one in sums / ctx.count)
        gradient = of_mean + 2 * of_variance * (input - _spread(mean, input))
        return gradient.to(input.dtype), None


def _summary(input: torch.Tensor) -> torch.Tensor:
    """Values a channel, means, and sums of squared deviations: 1 + 2 C numbers of float64."""
    values = input.detach()
    features = values.shape[1]
    count = values.numel() // features if features else 0
    summary = torch.zeros(1 + 2 * features, dtype=torch.float64)
    if count:
        dims = [0, *range(2, values.dim())]
        variance, mean = torch.var_mean(values.to(_computed_in(values)), dims, correction=0)
        summary[0] = count
        summary[1 : 1 + features] = mean
        summary[1 + features :] = variance.double() * count
    return summary


def _computed_in(input: torch.Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


def _spread(channels: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """(C,) in a form that broadcasts over (N, C, ...)."""
    return channels.reshape(-1, *[1] * (input.dim() - 2))
