"""Port a training job: DPO of a small language model, from torch to JAX, compared step by step.

You get a check that names what is wrong in a port of a training loop: the step, the stage and the tensor.

    pip install "jaxfn[examples,torch]"
    python examples/journeys/training_job.py
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.nn import functional

import jaxfn

WORDS, WIDTH, LENGTH, PAIRS, STEPS, WARM_UP = 12, 8, 6, 4, 14, 3
BETA, RATE, COOLING, DECAY, MAX_NORM = 0.5, 4e-3, 0.7, 0.1, 1.0


# The job in torch.


class LanguageModel(torch.nn.Module):
    """A layer of causal attention between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
        return self.norm(x + y) @ self.embed.weight.T


class Preference(torch.nn.Module):
    """A model that is trained, and a frozen copy."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LanguageModel()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)


def torch_logp(model: LanguageModel, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logp = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (logp * mask[:, 1:]).sum(1)


def torch_loss(module: Preference, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    def margin(model: LanguageModel) -> torch.Tensor:
        better, worse = (torch_logp(model, batch[name], batch[f"{name}_mask"]) for name in ("chosen", "rejected"))
        return better - worse

    with torch.no_grad():
        reference = margin(module.reference)
    return -functional.logsigmoid(BETA * (margin(module.policy) - reference)).mean()


def torch_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [[p for p in parameters if (p.ndim > 1) is is_matrix] for is_matrix in (True, False)]
    decays = ({"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0.0), strict=True))
    return torch.optim.AdamW(decays, RATE)


def torch_schedule(optimizer: torch.optim.Optimizer) -> Any:
    def factor(step: int) -> float:
        return (step + 1) / WARM_UP if step < WARM_UP else COOLING ** (step - WARM_UP + 1)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_torch(module: Preference, batches: list[Any]) -> list[float]:
    module = copy.deepcopy(module)
    parameters = list(module.policy.parameters())
    optimizer = torch_optimizer(parameters)
    scheduler = torch_schedule(optimizer)
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = torch_loss(module, {name: torch.as_tensor(x) for name, x in batch.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


# The job in JAX. Its attention has one matrix, where torch has three.

Params = dict[str, Any]


def load(arrays: dict[str, jax.Array]) -> Params:
    """Returns the parameters from torch's arrays by name."""

    def model(name: str) -> Params:
        qkv = jnp.concatenate([arrays[f"{name}.{part}.weight"].T for part in "qkv"], 1)
        norm = {"scale": arrays[f"{name}.norm.weight"], "bias": arrays[f"{name}.norm.bias"]}
        return {"embed": arrays[f"{name}.embed.weight"], "qkv": qkv, "norm": norm}

    return {name: model(name) for name in ("policy", "reference")}


def log_probabilities(p: Params, tokens: jax.Array) -> jax.Array:
    x = p["embed"][tokens]
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), q @ k.mT / WIDTH**0.5, -jnp.inf)
    y = jax.nn.standardize(x + jax.nn.softmax(scores) @ v, epsilon=1e-5) * p["norm"]["scale"] + p["norm"]["bias"]
    return jax.nn.log_softmax(y @ p["embed"].T)


def logp(p: Params, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    words = jnp.take_along_axis(log_probabilities(p, tokens)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    return (words * mask[:, 1:]).sum(1)


def loss(p: Params, batch: dict[str, jax.Array], freeze: Callable[[Params], Params] = jax.lax.stop_gradient) -> Any:
    def margin(p: Params) -> jax.Array:
        better, worse = (logp(p, batch[name], batch[f"{name}_mask"]) for name in ("chosen", "rejected"))
        return better - worse

    return -jax.nn.log_sigmoid(BETA * (margin(p["policy"]) - margin(freeze(p["reference"])))).mean()


def trains_reference(p: Params, batch: dict[str, jax.Array]) -> Any:  # the first mistake
    return loss(p, batch, freeze=lambda p: p)


def decays(p: Params) -> Any:
    """The mask of what decays: the matrices of the policy."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim > 1 and path[0].key == "policy", p)


def schedule(step: Any) -> Any:
    return RATE * jnp.where(step < WARM_UP, (step + 1) / WARM_UP, COOLING ** (step - WARM_UP + 1))


def constant(step: Any) -> Any:  # the second mistake: no decay after warming up
    return RATE * jnp.minimum((step + 1) / WARM_UP, 1.0)


def optimizer(schedule: Callable[[Any], Any] = schedule) -> optax.GradientTransformation:
    adamw = optax.adamw(schedule, weight_decay=DECAY, mask=decays)
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)


def train(p: Params, batches: list[Any], optimizer: optax.GradientTransformation) -> list[float]:
    @jax.jit
    def step(p: Params, state: Any, batch: Any) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(p, batch)
        updates, state = optimizer.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, value

    state, losses = optimizer.init(p), []
    for batch in batches:
        p, state, value = step(p, state, batch)
        losses.append(float(value))
    return losses


# The comparison.


def job() -> tuple[Preference, list[Any]]:
    """Returns the module, and a batch for each step."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    pairs = {name: generator.integers(0, WORDS, (PAIRS, LENGTH)) for name in ("chosen", "rejected")}
    ends = {f"{name}_mask": np.arange(LENGTH) < generator.integers(3, LENGTH + 1, (PAIRS, 1)) for name in pairs}
    return Preference(), [pairs | ends] * STEPS


class Results(NamedTuple):
    right: jaxfn.reports.TrainingcheckReport
    trained_reference: jaxfn.reports.TrainingcheckReport
    constant_rate: jaxfn.reports.TrainingcheckReport


def main(arguments: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description="Port a training job.")
    parser.add_argument("--picture", help="the file to save the losses in, such as training_job.svg")
    options = parser.parse_args(arguments)
    module, batches = job()

    def check(loss: Any, optimizer: optax.GradientTransformation) -> jaxfn.reports.TrainingcheckReport:
        return jaxfn.trainingcheck(
            loss,
            torch_loss,
            batches,
            module=module,
            load=load,
            optimizer=(optimizer, torch_optimizer),
            scheduler=torch_schedule,
            max_norm=MAX_NORM,
            raise_exception=False,
        )

    results = Results(check(loss, optimizer()), check(trains_reference, optimizer()), check(loss, optimizer(constant)))
    print(results.right)
    for report in results[1:]:
        print(f"step {report.step}, {report.stage}: {report.name} ({report.looks_like})")
    if options.picture:
        picture(results).savefig(options.picture)
    return results


def picture(_: Results) -> Any:
    """Returns a figure of the losses of torch, of the port, and of the port with a constant learning rate."""
    from matplotlib.figure import Figure

    module, batches = job()
    p = load({name: jnp.asarray(x.detach().numpy()) for name, x in module.state_dict().items()})
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    panel: Any = figure.subplots()
    panel.plot(train_torch(module, batches), color="gray", linewidth=5, alpha=0.5, label="torch")
    panel.plot(train(p, batches, optimizer()), label="the port")
    panel.plot(train(p, batches, optimizer(constant)), "--", label="the port with a constant learning rate")
    panel.axvline(WARM_UP, color="gray", linewidth=0.8, linestyle=":")
    panel.set(xlabel="step", ylabel="loss")
    panel.legend()
    return figure


if __name__ == "__main__":
    main()
