"""Small training jobs in torch and in JAX: fifteen families of models, three objectives, and mistakes of ports.

A body takes tokens (batch, length) to features (batch, length, WIDTH). The objectives add heads: supervised fine-tuning
with masked labels, DPO with a frozen reference, and PPO with clipping, a value loss and generalized advantages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn
from torch.nn import functional

BATCH, LENGTH, WIDTH, WORDS, IGNORED = 3, 5, 6, 11, -100
BETA, GAMMA, LAMBDA, CLIP = 0.5, 0.97, 0.9, 0.2


# Bodies. The port has matrices as (in, out); what each does else in another layout is in its `load`.


def transposed(arrays):
    """Returns arrays with the matrices of linear layers as (in, out)."""
    return {
        name: x.T if x.ndim == 2 and name.endswith("weight") and not name.startswith("embed") else x
        for name, x in arrays.items()
    }


def dense(p, name, x):
    y = x @ p[f"{name}.weight"]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def normalized(p, name, x, epsilon):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * p[f"{name}.weight"] + p[f"{name}.bias"]


def averaged(x):
    """Returns the means over all positions up to each; of tensors and of arrays."""
    return x.cumsum(1) / (np if isinstance(x, np.ndarray) else jnp).arange(1, LENGTH + 1)[:, None]


class Body(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        for name, layer in layers.items():
            setattr(self, name, layer)


def linear(inputs=WIDTH, outputs=WIDTH, bias=True):
    return nn.Linear(inputs, outputs, bias=bias)


def mean_before(x):
    return x.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]


class MLP(Body):
    def __init__(self):
        super().__init__(fc1=linear(2 * WIDTH, 8), norm=nn.LayerNorm(8), fc2=linear(8))

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.fc2(torch.tanh(self.norm(self.fc1(torch.cat([x, mean_before(x)], -1)))))


def mlp(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens]
    x = normalized(p, "norm", dense(p, "fc1", jnp.concatenate([x, averaged(x)], -1)), 1e-6 if wrong == "norm" else 1e-5)
    return dense(p, "fc2", jnp.tanh(x)), s


class CNN(Body):
    def __init__(self):
        super().__init__(conv=nn.Conv1d(WIDTH, WIDTH, 3, bias=False), norm=nn.BatchNorm1d(WIDTH), out=linear())

    def forward(self, tokens):
        x = self.conv(functional.pad(self.embed(tokens).mT, (2, 0)))
        return self.out(torch.relu(self.norm(x)).mT)


def load_cnn(arrays):
    return transposed(arrays) | {"conv.weight": arrays["conv.weight"].transpose(2, 1, 0)}


def cnn(p, s, tokens, is_training, wrong):
    x = jnp.pad(p["embed.weight"][tokens], ((0, 0), (2, 0), (0, 0)))
    x = sum(x[:, i : i + LENGTH] @ p["conv.weight"][i] for i in range(3))
    mean, var, new = s["norm.running_mean"], s["norm.running_var"], s
    if is_training:
        mean, var, count = x.mean((0, 1)), x.var((0, 1)), x.shape[0] * x.shape[1]
        momentum = 0.2 if wrong == "momentum" else 0.1
        unbiased = var if wrong == "biased var" else var * count / (count - 1)
        seen = {"norm.running_mean": mean, "norm.running_var": unbiased}
        if wrong != "buffers":
            new = {name: (1 - momentum) * x + momentum * seen[name] for name, x in s.items()}
    x = (x - mean) / jnp.sqrt(var + (1e-3 if wrong == "norm" else 1e-5)) * p["norm.weight"] + p["norm.bias"]
    return dense(p, "out", jax.nn.relu(x)), new


HEADS = 2


class Transformer(Body):
    def __init__(self):
        layers = {name: linear() for name in "qkvo"}
        super().__init__(**layers, norm=nn.LayerNorm(WIDTH), fc1=linear(WIDTH, 9), fc2=linear(9))

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        return x + self.fc2(functional.gelu(self.fc1(x)))


def load_transformer(arrays):
    p = transposed(arrays)
    return {name: x for name, x in p.items() if name[0] not in "qkv"} | {
        f"qkv.{kind}": jnp.concatenate([p[f"{name}.{kind}"] for name in "qkv"], -1) for kind in ("weight", "bias")
    }


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def transformer(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens]
    y = dense(p, "qkv", normalized(p, "norm", x, 1e-6 if wrong == "norm" else 1e-5))
    y = attention(*(part.reshape(*tokens.shape, HEADS, -1) for part in jnp.split(y, 3, -1)))
    x = x + dense(p, "o", y.reshape(x.shape))
    return x + dense(p, "fc2", jax.nn.gelu(dense(p, "fc1", x), approximate=False)), s


class Recurrent(Body):
    def __init__(self, kind):
        super().__init__(cell=kind(WIDTH, WIDTH, batch_first=True))

    def forward(self, tokens):
        return self.cell(self.embed(tokens))[0]


def load_recurrent(arrays):
    return {name: x.T if "weight_" in name else x for name, x in arrays.items()}


def recurrent(step, states, p, s, tokens, is_training, wrong):
    def scanned(state, x):
        gates_x = x @ p["cell.weight_ih_l0"] + p["cell.bias_ih_l0"]
        gates_h = state[0] @ p["cell.weight_hh_l0"] + p["cell.bias_hh_l0"]
        state = step(state, gates_x, gates_h)
        return state, state[0]

    x = p["embed.weight"][tokens]
    zero = jnp.zeros_like(x[:, 0])
    _, y = jax.lax.scan(scanned, (zero,) * states, x.swapaxes(0, 1))
    return y.swapaxes(0, 1), s


def gru_step(state, x, h):
    (xr, xz, xn), (hr, hz, hn) = jnp.split(x, 3, -1), jnp.split(h, 3, -1)
    z = jax.nn.sigmoid(xz + hz)
    return ((1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * state[0],)


def lstm_step(state, x, h):
    i, f, g, o = jnp.split(x + h, 4, -1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def rnn_step(state, x, h):
    return (jnp.tanh(x + h),)


class Bag(Body):
    def __init__(self):
        super().__init__(out=linear())
        self.embed = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")

    def forward(self, tokens):
        pairs = torch.stack([tokens.roll(1, 1), tokens], -1)
        return torch.sin(self.out(self.embed(pairs.flatten(0, 1)).unflatten(0, tokens.shape)))


def bag(p, s, tokens, is_training, wrong):
    pairs = jnp.stack([jnp.roll(tokens, 1, 1), tokens], -1)
    return jnp.sin(dense(p, "out", p["embed.weight"][pairs].mean(2))), s


class Mixer(Body):
    def __init__(self):
        super().__init__(tokens=linear(LENGTH, LENGTH), fc1=linear(WIDTH, 8), fc2=linear(8, WIDTH, bias=False))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.tokens(x.mT).mT
        return x + self.fc2(functional.silu(self.fc1(x)))


def mixer(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens]
    x = x + jnp.einsum("btd,tu->bud", x, p["tokens.weight"]) + p["tokens.bias"][:, None]
    return x + dense(p, "fc2", jax.nn.silu(dense(p, "fc1", x))), s


class Residual(Body):
    def __init__(self):
        super().__init__(conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1), norm=nn.GroupNorm(2, WIDTH))

    def forward(self, tokens):
        x = self.embed(tokens).mT
        return (x + torch.tanh(self.norm(self.conv(x)))).mT


def residual(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens]
    y = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    y = sum(y[:, i : i + LENGTH] @ p["conv.weight"][i] for i in range(3)) + p["conv.bias"]
    groups = y.reshape(-1, LENGTH, 2, WIDTH // 2)
    groups = groups - groups.mean((1, 3), keepdims=True)
    epsilon = 1e-6 if wrong == "norm" else 1e-5
    y = (groups / jnp.sqrt((groups**2).mean((1, 3), keepdims=True) + epsilon)).reshape(y.shape)
    return x + jnp.tanh(y * p["norm.weight"] + p["norm.bias"]), s


class Gated(Body):
    def __init__(self):
        gates = {"gate": linear(WIDTH, 8, bias=False), "up": linear(WIDTH, 8, bias=False)}
        super().__init__(norm=nn.RMSNorm(WIDTH, eps=1e-6), **gates, down=linear(8, WIDTH, bias=False))

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.norm(x + mean_before(x))
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def load_gated(arrays):
    p = transposed(arrays)
    return p | {"both": jnp.stack([p.pop("gate.weight"), p.pop("up.weight")])}


def gated(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens]
    y = x + averaged(x)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + (1e-5 if wrong == "norm" else 1e-6)) * p["norm.weight"]
    gate, up = y @ p["both"][0], y @ p["both"][1]
    return x + dense(p, "down", jax.nn.silu(gate) * up), s


class LinearAttention(Body):
    def __init__(self):
        super().__init__(**{name: linear(bias=False) for name in "qkv"})

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = functional.elu(self.q(x)) + 1, functional.elu(self.k(x)) + 1, self.v(x)
        states = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        return x + torch.einsum("btd,btde->bte", q, states) / (q * k.cumsum(1)).sum(-1, keepdim=True)


def linear_attention(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens]
    q, k, v = jax.nn.elu(dense(p, "q", x)) + 1, jax.nn.elu(dense(p, "k", x)) + 1, dense(p, "v", x)
    states = jnp.cumsum(k[..., None] * v[..., None, :], 1)
    return x + (q[..., None] * states).sum(2) / (q * jnp.cumsum(k, 1)).sum(-1, keepdims=True), s


class Experts(Body):
    def __init__(self):
        super().__init__(gate=linear(WIDTH, 3, bias=False), experts=nn.ModuleList(linear() for _ in range(3)))

    def forward(self, tokens):
        x = self.embed(tokens)
        weights = self.gate(mean_before(x)).softmax(-1)
        return x + sum(weights[..., i : i + 1] * torch.tanh(f(x)) for i, f in enumerate(self.experts))


def load_experts(arrays):
    p = transposed(arrays)
    stacked = {kind: jnp.stack([p.pop(f"experts.{i}.{kind}") for i in range(3)]) for kind in ("weight", "bias")}
    return p | {f"experts.{kind}": x for kind, x in stacked.items()}


def experts(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens]
    y = jnp.tanh(jnp.einsum("btd,nde->btne", x, p["experts.weight"]) + p["experts.bias"])
    return x + jnp.einsum("btn,btne->bte", jax.nn.softmax(dense(p, "gate", averaged(x))), y), s


class Depthwise(Body):
    def __init__(self):
        conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        super().__init__(conv=conv, gate=linear())

    def forward(self, tokens):
        x = self.embed(tokens)
        return torch.sigmoid(self.gate(x)) * self.conv(functional.pad(x.mT, (2, 0))).mT


def load_depthwise(arrays):
    return transposed(arrays) | {"conv.weight": arrays["conv.weight"][:, 0].T}


def depthwise(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens]
    y = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    y = sum(y[:, i : i + LENGTH] * p["conv.weight"][i] for i in range(3)) + p["conv.bias"]
    return jax.nn.sigmoid(dense(p, "gate", x)) * y, s


class StateSpace(Body):
    def __init__(self):
        super().__init__(inputs=linear(), outputs=linear())
        self.decay, self.skip = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens):
        x = self.inputs(self.embed(tokens))
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(LENGTH):
            state = torch.sigmoid(self.decay) * state + x[:, t]
            states.append(state)
        return self.outputs(torch.stack(states, 1) + self.skip * x)


def state_space(p, s, tokens, is_training, wrong):
    x = dense(p, "inputs", p["embed.weight"][tokens])

    def combine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    decays = jnp.broadcast_to(jax.nn.sigmoid(p["decay"]), x.shape)
    _, states = jax.lax.associative_scan(combine, (decays, x), axis=1)
    return dense(p, "outputs", states + p["skip"] * x), s


class MultiQuery(Body):
    def __init__(self):
        super().__init__(q=linear(), kv=linear(WIDTH, 6), o=linear(), positions=nn.Embedding(LENGTH, WIDTH))

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions.weight
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
        scores = (q @ k.mT / 3**0.5).masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
        return x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def load_multi_query(arrays):
    return transposed(arrays) | {"positions.weight": arrays["positions.weight"]}


def multi_query(p, s, tokens, is_training, wrong):
    x = p["embed.weight"][tokens] + p["positions.weight"]
    q = dense(p, "q", x).reshape(*tokens.shape, HEADS, -1)
    k, v = (jnp.broadcast_to(part[:, :, None], q.shape) for part in jnp.split(dense(p, "kv", x), 2, -1))
    return x + dense(p, "o", attention(q, k, v).reshape(x.shape)), s


class Family(NamedTuple):
    """A model in torch and in JAX; some have normalization or buffers, or a head tied to the embedding."""

    make: Callable[[], Body]
    apply: Callable[..., Any]
    load: Callable[[Any], Any] = transposed
    has_norm: bool = False
    is_tied: bool = False
    buffers: tuple[str, ...] = ()


FAMILIES = {
    "mlp": Family(MLP, mlp, has_norm=True),
    "cnn": Family(CNN, cnn, load_cnn, has_norm=True, buffers=("norm.running_mean", "norm.running_var")),
    "transformer": Family(Transformer, transformer, load_transformer, has_norm=True, is_tied=True),
    "gru": Family(partial(Recurrent, nn.GRU), partial(recurrent, gru_step, 1), load_recurrent),
    "lstm": Family(partial(Recurrent, nn.LSTM), partial(recurrent, lstm_step, 2), load_recurrent),
    "rnn": Family(partial(Recurrent, nn.RNN), partial(recurrent, rnn_step, 1), load_recurrent, is_tied=True),
    "bag": Family(Bag, bag),
    "mixer": Family(Mixer, mixer),
    "residual": Family(Residual, residual, load_cnn, has_norm=True),
    "gated": Family(Gated, gated, load_gated, has_norm=True),
    "linear attention": Family(LinearAttention, linear_attention),
    "experts": Family(Experts, experts, load_experts, is_tied=True),
    "depthwise": Family(Depthwise, depthwise, load_depthwise),
    "state space": Family(StateSpace, state_space),
    "multi-query": Family(MultiQuery, multi_query, load_multi_query),
}


# Objectives.


class Model(nn.Module):
    """A body with a head for words and one for values."""

    def __init__(self, family, has_value):
        super().__init__()
        self.body, self.head = family.make(), linear(WIDTH, WORDS, bias=False)
        if family.is_tied:
            self.head.weight = self.body.embed.weight
        if has_value:
            self.value = linear(WIDTH, 1)

    def forward(self, tokens):
        return self.head(self.body(tokens))


def inside(arrays, prefix):
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


class Port(NamedTuple):
    """The model in JAX, with a mistake."""

    family: Family
    wrong: str = ""

    def load(self, arrays):
        """Returns parameters and buffers."""
        body = inside(arrays, "body.")
        buffers = {name: body.pop(name) for name in self.family.buffers}
        body = {name: x for name, x in body.items() if not name.endswith("num_batches_tracked")}
        parameters = {"body": self.family.load(body)}
        if not self.family.is_tied:
            parameters["head"] = arrays["head.weight"].T
        if "value.weight" in arrays:
            parameters["value"] = arrays["value.weight"].T, arrays["value.bias"]
        return parameters, buffers

    def features(self, p, s, tokens, is_training=True):
        x, s = self.family.apply(p["body"], s, tokens, is_training, self.wrong)
        if self.wrong == "dropout":
            x = x * jax.random.bernoulli(jax.random.key(0), 0.9, x.shape) / 0.9
        return (jax.lax.stop_gradient(x) if self.wrong == "constant" else x), s

    def logits(self, p, x):
        return x @ (p["body"]["embed.weight"].T if self.family.is_tied else p["head"])


def log_softmax(x, wrong):
    return jax.nn.log_softmax(x, axis=1 if wrong == "axis" else -1)


def chosen(logp, words):
    """Returns the log-probabilities of words; of tensors and of arrays."""
    if isinstance(logp, torch.Tensor):
        return logp.gather(-1, words[..., None])[..., 0]
    return jnp.take_along_axis(logp, words[..., None], -1)[..., 0]


def torch_sft(model, batch):
    logits, labels = model(batch["tokens"])[:, :-1], batch["labels"][:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def sft(port, p, s, batch):
    wrong = port.wrong
    x, s = port.features(p, s, batch["tokens"])
    logits = port.logits(p, x)[:, :-1]
    labels = batch["labels"][:, :-1] if wrong == "shift" else batch["labels"][:, 1:]
    mask = jnp.ones_like(labels, bool) if wrong == "mask" else labels != IGNORED
    losses = -chosen(log_softmax(logits, wrong), jnp.where(labels == IGNORED, 0, labels)) * mask
    return losses.sum() / {"sum": 1, "mean": mask.size}.get(wrong, mask.sum()), s


class Preference(nn.Module):
    def __init__(self, family):
        super().__init__()
        self.policy = Model(family, False)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False).eval()

    def forward(self, batch):
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        mask = torch.cat([batch["chosen_mask"], batch["rejected_mask"]])[:, 1:]

        def logp(model):
            words = chosen(model(tokens)[:, :-1].log_softmax(-1), tokens[:, 1:])
            return (words * mask).sum(1)

        with torch.no_grad():
            reference = logp(self.reference)
        better, worse = (logp(self.policy) - reference).chunk(2)
        return -functional.logsigmoid(BETA * (better - worse)).mean()


def dpo(port, p, s, batch):
    wrong = port.wrong
    tokens = jnp.concatenate([batch["chosen"], batch["rejected"]])
    mask = jnp.concatenate([batch["chosen_mask"], batch["rejected_mask"]])[:, 1:]
    mask = jnp.ones_like(mask) if wrong == "mask" else mask

    def logp(p, s, is_training):
        x, s = port.features(p, s, tokens, is_training)
        words = tokens[:, :-1] if wrong == "shift" else tokens[:, 1:]
        words = chosen(log_softmax(port.logits(p, x)[:, :-1], wrong), words) * mask
        return (words.sum(1) / mask.sum(1) if wrong == "mean" else words.sum(1)), s

    frozen = p["reference"] if wrong == "reference" else jax.lax.stop_gradient(p["reference"])
    reference, _ = logp(frozen, s["reference"], False)
    policy, new = logp(p["policy"], s["policy"], True)
    better, worse = jnp.split(policy - reference, 2)
    better, worse = (worse, better) if wrong == "swap" else (better, worse)
    losses = -jax.nn.log_sigmoid((0.1 if wrong == "beta" else BETA) * (better - worse))
    return (losses.sum() if wrong == "sum" else losses.mean()), s | {"policy": new}


def advantages(rewards, values, gamma, decay, stack):
    """Returns generalized advantages; of tensors and of arrays."""
    found, advantage = [], 0.0
    for t in reversed(range(LENGTH)):
        after = values[:, t + 1] if t + 1 < LENGTH else 0.0
        advantage = rewards[:, t] + gamma * after - values[:, t] + gamma * decay * advantage
        found.insert(0, advantage)
    return stack(found, 1)


def torch_ppo(model, batch):
    x = model.body(batch["tokens"])
    values, logp = model.value(x)[..., 0], model.head(x).log_softmax(-1)
    ratio = (chosen(logp, batch["actions"]) - batch["old_logp"]).exp()
    with torch.no_grad():
        advantage = advantages(batch["rewards"], values, GAMMA, LAMBDA, torch.stack)
        returns = advantage + values
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = batch["old_values"] + (values - batch["old_values"]).clamp(-CLIP, CLIP)
    mask = batch["mask"]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    entropy = -(logp.exp() * logp).sum(-1)
    policy, value, entropy = ((x * mask).sum() / mask.sum() for x in (-surrogate, errors, entropy))
    return {"policy": policy, "value": 0.5 * value, "entropy": -0.01 * entropy}


def ppo(port, p, s, batch):
    wrong = port.wrong
    x, s = port.features(p, s, batch["tokens"])
    weight, bias = p["value"]
    values, logp = (x @ weight + bias)[..., 0], log_softmax(port.logits(p, x), wrong)
    ratio = jnp.exp(chosen(logp, batch["actions"]) - batch["old_logp"])
    now = values if wrong == "advantage" else jax.lax.stop_gradient(values)
    decay, gamma = (0.95 if wrong == "lambda" else LAMBDA), (0.99 if wrong == "gamma" else GAMMA)
    advantage = advantages(batch["rewards"], now, gamma, decay, jnp.stack)
    returns = jax.lax.stop_gradient(advantage + now)
    advantage = (advantage - advantage.mean()) / (advantage.std(ddof=0 if wrong == "biased" else 1) + 1e-8)
    clip = 10.0 if wrong == "no clip" else CLIP
    clipped = batch["old_values"] + jnp.clip(values - batch["old_values"], -CLIP, CLIP)
    mask = jnp.ones_like(batch["mask"]) if wrong == "mask" else batch["mask"]
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    errors = jnp.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    count = 1 if wrong == "sum" else mask.size if wrong == "mean" else mask.sum()
    policy, value, entropy = ((x * mask).sum() / count for x in (-surrogate, errors, entropy))
    return {"policy": policy, "value": (1.0 if wrong == "value" else 0.5) * value, "entropy": -0.01 * entropy}, s


def draw_sft(generator):
    tokens = generator.integers(0, WORDS, (BATCH, LENGTH))
    prompt = generator.integers(1, 3, (BATCH, 1))
    return {"tokens": tokens, "labels": np.where(np.arange(LENGTH) <= prompt, IGNORED, tokens)}


def draw_dpo(generator):
    words = {name: generator.integers(0, WORDS, (BATCH, LENGTH)) for name in ("chosen", "rejected")}
    lengths = {f"{name}_mask": generator.integers(2, LENGTH, (BATCH, 1)) for name in words}
    return words | {name: np.arange(LENGTH) <= length for name, length in lengths.items()}


def draw_ppo(generator):
    tokens, actions = (generator.integers(0, WORDS, (BATCH, LENGTH)) for _ in range(2))
    names = ("rewards", "old_values", "old_logp")
    numbers = {name: generator.standard_normal((BATCH, LENGTH)).astype(np.float32) for name in names}
    numbers["old_logp"] = 0.5 * numbers["old_logp"] - np.float32(np.log(WORDS))
    mask = np.arange(LENGTH) <= generator.integers(2, LENGTH, (BATCH, 1))
    return numbers | {"tokens": tokens, "actions": actions, "mask": mask}


class Objective(NamedTuple):
    """A loss in torch and in JAX."""

    torch_loss: Callable[[Any, Any], Any]
    loss: Callable[..., Any]
    draw: Callable[[Any], Any]


OBJECTIVES = {
    "sft": Objective(torch_sft, sft, draw_sft),
    "dpo": Objective(lambda model, batch: model(batch), dpo, draw_dpo),
    "ppo": Objective(torch_ppo, ppo, draw_ppo),
}


class Job(NamedTuple):
    """A training job: the arguments of `jaxfn.trainingcheck`, apart from the optimizer."""

    family: str
    objective: str

    def module(self, seed=0):
        torch.manual_seed(seed)
        family = FAMILIES[self.family]
        return Preference(family) if self.objective == "dpo" else Model(family, self.objective == "ppo")

    @property
    def torch_loss(self):
        return OBJECTIVES[self.objective].torch_loss

    def batches(self, number, seed=0):
        generator = np.random.default_rng(seed)
        return [OBJECTIVES[self.objective].draw(generator) for _ in range(number)]

    @property
    def has_buffers(self):
        return bool(FAMILIES[self.family].buffers)

    def load(self, arrays):
        port = Port(FAMILIES[self.family])
        if self.objective != "dpo":
            loaded = port.load(arrays)
        else:
            of_policy, of_reference = (port.load(inside(arrays, f"{which}.")) for which in ("policy", "reference"))
            loaded = tuple({"policy": x, "reference": y} for x, y in zip(of_policy, of_reference, strict=True))
        return loaded if self.has_buffers else loaded[0]

    def loss(self, wrong=""):
        """Returns the port of the loss, with a mistake."""
        run = partial(OBJECTIVES[self.objective].loss, Port(FAMILIES[self.family], wrong))
        if self.has_buffers:
            return run
        no_buffers = {"policy": {}, "reference": {}}
        return lambda parameters, batch: run(parameters, no_buffers, batch)[0]


JOBS = [Job(family, objective) for family in FAMILIES for objective in OBJECTIVES]


# Optimizers.


class Lion(torch.optim.Optimizer):
    """Lion, which torch does not have."""

    def __init__(self, parameters, lr, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p -= group["lr"] * (b1 * average + (1 - b1) * p.grad).sign()
                average.mul_(b2).add_((1 - b2) * p.grad)


RATE, DECAY, STEPS = 1e-2, 0.1, 4


def decays(parameters):
    """The mask of what decays: matrices, not biases and norms, and not a frozen reference."""

    def is_decayed(path, x):
        return x.ndim > 1 and path[0].key != "reference" and "bias" not in jax.tree_util.keystr(path)

    return jax.tree_util.tree_map_with_path(is_decayed, parameters)


def by_ndim(make):
    """Returns an optimizer of torch whose weights decay, except biases and norms."""

    def of(parameters):
        groups = [[p for p in parameters if (p.ndim > 1) is is_matrix] for is_matrix in (True, False)]
        return make([{"params": groups[0], "weight_decay": DECAY}, {"params": groups[1], "weight_decay": 0.0}])

    return of


def rated(of_torch, **options):
    return partial(of_torch, lr=RATE, **options)


ADAFACTOR = optax.chain(
    optax.scale_by_factored_rms(min_dim_size_to_factor=0, epsilon=1e-32),
    optax.clip_by_block_rms(1.0),
    optax.scale(-RATE),
    optax.scale_by_param_block_rms(),
)
PAIRS = {  # of equal optimizers, of torch and optax, which computes the decay of Adafactor in float32
    "sgd": (rated(torch.optim.SGD, weight_decay=DECAY), optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE))),
    "nesterov": (rated(torch.optim.SGD, momentum=0.9, nesterov=True), optax.sgd(RATE, 0.9, nesterov=True)),
    "adam": (rated(torch.optim.Adam), optax.adam(RATE)),
    "adamw": (by_ndim(rated(torch.optim.AdamW)), optax.adamw(RATE, weight_decay=DECAY, mask=decays)),
    "rmsprop": (
        rated(torch.optim.RMSprop, momentum=0.9),
        optax.rmsprop(RATE, 0.99, eps_in_sqrt=False, momentum=0.9),
    ),
    "adafactor": (rated(torch.optim.Adafactor, weight_decay=0.0), ADAFACTOR),
    "lion": (rated(Lion), optax.lion(RATE, weight_decay=0.0)),
}


def cosine(count):
    return RATE * (1 + jnp.cos(jnp.pi * count / STEPS)) / 2


def adamw(mask=decays, max_norm=0.5, shift=0, **options):
    """AdamW with a decay mask, a schedule, and clipping."""
    rate = lambda count: cosine(count + shift)  # noqa: E731
    chain = [optax.adamw(rate, weight_decay=DECAY, mask=mask, **options)]
    return optax.chain(*([optax.clip_by_global_norm(max_norm)] if max_norm else []), *chain)


def uncorrected(b1=0.9, b2=0.999):
    """Adam without bias correction."""

    def update(gradient, state, parameters=None):
        mean, square = (optax.update_moment(gradient, state[i], (b1, b2)[i], i + 1) for i in range(2))
        step = jax.tree.map(lambda m, v: -RATE * m / (jnp.sqrt(v) + 1e-8), mean, square)
        return step, (mean, square)

    return optax.GradientTransformation(lambda p: (jax.tree.map(jnp.zeros_like, p),) * 2, update)


class Training(NamedTuple):
    """An optimizer in torch and optax; the mistakes, by name, are other optimizers with stages and a part of names."""

    make: Callable[[Any], Any]
    optimizer: optax.GradientTransformation
    options: dict[str, Any]
    mistakes: dict[str, tuple[optax.GradientTransformation, str, str]]

    @property
    def batches(self):
        return STEPS * self.options.get("accumulate", 1)


def trainings() -> dict[str, Training]:
    return {
        "adamw": Training(
            by_ndim(partial(torch.optim.AdamW, lr=RATE)),
            adamw(),
            {"scheduler": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS), "max_norm": 0.5},
            {
                "decay of all": (adamw(mask=None), "parameters", ""),
                "no clipping": (adamw(max_norm=None), "clipping", "norm"),
                "other norm": (adamw(max_norm=0.4), "clipping", "norm"),
                "late schedule": (adamw(shift=1), "parameters", ""),
                "epsilon": (adamw(eps=1e-5), "parameters", ""),
                "decay rate": (adamw(b2=0.99), "optimizer", "exp_avg_sq"),
            },
        ),
        "adam": Training(
            partial(torch.optim.Adam, lr=RATE),
            optax.adam(RATE),
            {"accumulate": 2},
            {
                "sum of batches": (optax.chain(optax.scale(2.0), optax.adam(RATE)), "optimizer", "exp_avg"),
                "no bias correction": (uncorrected(), "parameters", ""),
                "decay": (optax.adamw(RATE, weight_decay=DECAY), "parameters", ""),
                "rate": (optax.adam(3 * RATE), "parameters", ""),
                "epsilon inside": (optax.adam(RATE, eps=0.0, eps_root=1e-8), "parameters", ""),
            },
        ),
        "sgd": Training(
            partial(torch.optim.SGD, lr=RATE, momentum=0.9),
            optax.sgd(RATE, 0.9),
            {},
            {
                "momentum": (optax.sgd(RATE, 0.8), "optimizer", "momentum_buffer"),
                "nesterov": (optax.sgd(RATE, 0.9, nesterov=True), "parameters", ""),
                "rate": (optax.sgd(RATE / 2, 0.9), "parameters", ""),
            },
        ),
    }


# Mistakes of losses: the stage, and a part of the name of the term or tensor.
MISTAKES = {
    "sft": {
        **dict.fromkeys(("dropout", "axis", "mask", "sum", "mean", "shift"), ("loss", "loss")),
        "constant": ("gradient", "body."),
    },
    "dpo": {  # all log-probabilities equal the reference's in the first step
        **dict.fromkeys(("dropout", "axis", "mask", "mean", "shift", "swap", "beta"), ("gradient", "policy.")),
        "sum": ("loss", "loss"),
        "constant": ("gradient", "policy.body."),
        "reference": ("gradient", "reference."),
    },
    "ppo": {
        **dict.fromkeys(("dropout", "axis", "mask", "sum", "mean", "lambda", "gamma"), ("loss", "")),
        "no clip": ("loss", "policy"),
        "biased": ("loss", "policy"),
        "value": ("loss", "value"),
        "constant": ("gradient", "body."),
        "advantage": ("gradient", ""),
    },
}


def mistakes_of(job: Job) -> dict[str, tuple[str, str]]:
    """Returns the mistakes of the loss and of the model, with the stage and a part of the name."""
    family, found = FAMILIES[job.family], dict(MISTAKES[job.objective])
    if family.has_norm:
        found["norm"] = ("loss", "") if job.objective != "dpo" else ("gradient", "policy.")
    if family.buffers:
        found |= dict.fromkeys(("buffers", "momentum"), ("buffers", "norm.running_"))
        found["biased var"] = ("buffers", "norm.running_var")
        if job.objective == "dpo":  # the reference computes with its running statistics, so the losses differ
            found |= {
                name: ("loss", "loss")
                for name in found
                if name in MISTAKES["sft"] | {"norm": 0, "swap": 0, "beta": 0} and name != "constant"
            }
    return found
