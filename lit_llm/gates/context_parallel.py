"""Does a model compute the same on a sequence split over ranks as on each of its documents alone?"""

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lit_llm import targets
from lit_llm.context import Layout, Shard, check_batch, keep_one_target, shard_batch
from lit_llm.gates.processes import RanksFailed, run_ranks
from lit_llm.huggingface import ContextRoute
from lit_llm.loss import causal_lm_loss
from lit_llm.verdict import Verdict

__all__ = ["context_parallel_parity"]

# Largest relative error of any parameter's gradient: rounding in the weights' precision, with room for deep models.
_THRESHOLDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def context_parallel_parity(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    attention: str = "ring",
    context_parallel_size: int = 2,
    layout: Layout = "balanced",
    max_tokens: int = 512,
    timeout: float = 120.0,
    start_method: str = "fork",
) -> Verdict:
    """Compare a sharded step with an unsharded one on the user's model and batch.

    The reference runs every document by itself, in this process. The sharded step runs the packed batch in
    ``context_parallel_size`` new CPU processes, through the same routing, sharding and normalisation as
    :class:`lit_llm.strategies.ContextParallelStrategy`. Compared are the loss and the gradient of every parameter,
    as :math:`|g - g_{ref}| / |g_{ref}|`. And the last token of the first document is changed: no logit of another
    document may move (measured against how far those of its own move). The model is evaluated (no dropout); its
    gradients, mode and the random state are left as they were.

    Args:
        model: called as ``model(**batch)``; answers with ``.loss``, or ``.logits``, or a dict of them, or logits.
        batch: with ``input_ids`` and ``labels`` ``[batch, seq]`` and, if packed, its boundaries.
        attention: how keys and queries meet, one of :data:`lit_llm.context.SCHEDULES`.
        context_parallel_size: ranks to split over.
        layout: see :func:`lit_llm.context.make_plan`.
        max_tokens: the batch is cut to so many tokens.
        timeout: seconds for the sharded step.
        start_method: "fork" or "spawn" for the processes; "spawn" needs a picklable model.

    Returns:
        A verdict that passes if the worst relative error is below the threshold for the weights' precision.

    Raises:
        ValueError: if the batch is malformed or has no target.

    Example::

        verdict = context_parallel_parity(model, next(iter(loader)))
        print(verdict)
    """
    started = time.monotonic()
    cut = _cut(batch, max_tokens)
    num_targets = int(targets.token_count(cut))
    if num_targets == 0:
        raise ValueError(f"the first {max_tokens} tokens of the batch have no target: raise max_tokens")
    parameters = dict(model.named_parameters())
    threshold = _THRESHOLDS.get(next(iter(parameters.values())).dtype, 1e-4)
    evidence: dict[str, Any] = {
        "unit": "relative gradient error",
        "tokens": int(cut["input_ids"].numel()),
        "documents": int(cut["cu_seqlens"].numel()) - 1,
        "targets": num_targets,
        "context_parallel_size": context_parallel_size,
        "attention": attention,
        "layout": layout,
        "reference": "every document by itself in one process",
    }
    with _undisturbed(model):
        loss, grads = _one_by_one(model, cut)
        try:
            answers = run_ranks(
                _sharded_step,
                context_parallel_size,
                model,
                cut,
                layout,
                attention,
                timeout=timeout,
                start_method=start_method,
            )
        except RanksFailed as failure:
            evidence["reason"] = str(failure).strip().splitlines()[-1]
            evidence["traceback"] = str(failure)
            return _verdict(float("inf"), threshold, evidence, started)
    errors = {name: _relative_error(answers[0][1].get(name), grad) for name, grad in grads.items()}
    worst = max(errors, key=lambda name: errors[name])
    loss_error = abs(answers[0][0] - loss) / max(abs(loss), 1e-12)
    evidence.update(
        loss=loss,
        sharded_loss=answers[0][0],
        loss_error=loss_error,
        worst_parameter=worst,
        worst_gradient_error=errors[worst],
        tokens_per_rank=[answer[2] for answer in answers],
    )
    evidence["leak"] = leak = _leak([answer[3] for answer in answers])
    measured = max(loss_error, errors[worst]) if all(error == error for error in errors.values()) else float("nan")
    if leak is not None and not leak <= threshold:
        evidence["unit"] = "movement of other documents' logits over that of the perturbed document's own"
        evidence["reason"] = "changing a token of one document moves the logits of another: documents see each other"
        measured = max(leak, measured)
    elif not measured <= threshold:
        evidence["reason"] = (
            f"the sharded loss is {answers[0][0]:.6g} where documents alone give {loss:.6g}, and the gradient of "
            f"{worst} is off by {errors[worst]:.2g}. Usual causes: the model shifts the labels itself instead of using "
            "shift_labels, ignores position_ids, or mixes tokens outside its attention"
        )
    return _verdict(measured, threshold, evidence, started)


def _verdict(measured: float, threshold: float, evidence: dict[str, Any], started: float) -> Verdict:
    passed = measured <= threshold
    return Verdict("context_parallel_parity", passed, measured, threshold, evidence, time.monotonic() - started)


def _cut(batch: Mapping[str, Any], max_tokens: int) -> dict[str, Tensor]:
    """The first tokens of the flattened batch, with the documents they belong to."""
    check_batch(batch)
    if batch.get("labels") is None:
        raise ValueError(f"the batch has no 'labels', only {sorted(batch)}: the gate compares losses")
    cu_seqlens = targets.batch_cu_seqlens(batch).cpu()
    total = min(max_tokens, int(cu_seqlens[-1]))
    inside = cu_seqlens[cu_seqlens < total]
    return {
        "input_ids": batch["input_ids"].reshape(1, -1)[:, :total].cpu(),
        "labels": batch["labels"].reshape(1, -1)[:, :total].cpu(),
        "cu_seqlens": torch.cat([inside, inside.new_tensor([total])]),
    }


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    state = torch.get_rng_state()
    try:
        model.eval()
        for parameter, _ in grads:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for module, training in modes:
            module.training = training
        torch.set_rng_state(state)


def _loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    logits = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)
    return causal_lm_loss(logits, batch)


def _one_by_one(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the token mean, every document by itself."""
    total, num_targets = 0.0, int(targets.token_count(batch))
    boundaries = batch["cu_seqlens"].tolist()
    for start, stop in itertools.pairwise(boundaries):
        document = {key: batch[key][:, start:stop] for key in ("input_ids", "labels")}
        count = int(targets.token_count(document))
        if count == 0:
            continue
        # what a shard holds, so that a model may use any of it
        document["position_ids"] = torch.arange(stop - start)[None]
        document["shift_labels"] = targets.shift(document["labels"], targets.batch_cu_seqlens(document))
        loss = _loss(model, document) * (count / num_targets)
        loss.backward()
        total += loss.item()
    return total, _grads(model)


def _leak(movements: list[tuple[float, float] | None]) -> float | None:
    """The largest movement outside the perturbed document over the largest inside; None if it was not measured."""
    measured = [movement for movement in movements if movement is not None]
    if len(measured) < len(movements):
        return None
    inside, outside = (max(values) for values in zip(*measured, strict=True))
    return outside / max(inside, 1e-30)


def _sharded_step(
    rank: int, model: nn.Module, batch: Mapping[str, Tensor], layout: Layout, attention: str
) -> tuple[float, dict[str, Tensor], int, tuple[float, float] | None]:
    size = dist.get_world_size()
    num_targets = int(targets.token_count(batch))
    shard = shard_batch(batch, size, rank, layout)
    route = ContextRoute(model, dist.group.WORLD if size > 1 else None, attention)
    route.shard = shard
    with route.refuse_unrouted():
        loss = _loss(model, keep_one_target(shard).batch)
    if route.num_calls == 0:
        raise ValueError(f"{type(model).__name__} made no attention call that could be routed")
    assert shard.num_targets is not None
    weighted = loss * (int(shard.num_targets) / num_targets)
    weighted.backward()
    moved = _perturb(model, batch, route, shard, layout)
    route.remove()
    total = weighted.detach().to(torch.float64)
    dist.all_reduce(total)
    grads = _grads(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return total.item(), grads if rank == 0 else {}, shard.plan.lengths[rank], moved


@torch.no_grad()
def _perturb(
    model: nn.Module, batch: Mapping[str, Tensor], route: ContextRoute, shard: Shard, layout: Layout
) -> tuple[float, float] | None:
    """How far this rank's logits move inside and outside the first document when its last token changes.

    None if there is one document only, or the model answers without logits.
    """
    boundaries = batch["cu_seqlens"].tolist()
    if len(boundaries) < 3:
        return None
    token = batch["input_ids"][0, boundaries[1] - 1]
    others = batch["input_ids"][batch["input_ids"] != token]
    if not len(others):
        return None
    perturbed = {**batch, "input_ids": batch["input_ids"].clone()}
    perturbed["input_ids"][0, boundaries[1] - 1] = others[0]
    logits = []
    for content in (batch, perturbed):
        route.shard = shard_batch(content, shard.plan.num_ranks, shard.rank, layout)
        logits.append(_logits(model(**keep_one_target(route.shard).batch)))
    if logits[0] is None or logits[1] is None:
        return None
    moved = (logits[1] - logits[0]).abs().flatten(0, -2).amax(-1)
    own = shard.plan.indices(shard.rank) < boundaries[1]
    inside, outside = (moved[which].max().item() if which.any() else 0.0 for which in (own, ~own))
    return inside, outside


def _logits(output: Any) -> Tensor | None:
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    return logits if isinstance(logits, Tensor) and logits.dim() >= 2 else None


def _grads(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, taken away from the parameters: a forked process would add to them."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return grads


def _relative_error(grad: Tensor | None, reference: Tensor) -> float:
    if grad is None:
        return float("inf")
    difference, size = (grad.double() - reference.double()).norm(), reference.double().norm()
    return float(difference / size) if size > 0 else float(difference)
