"""The arrays that pass between JAX and the methods of a Function, marked where somebody looks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxfn._compat import is_ref, own_lines
from jaxfn._observation import OBSERVATION, Label, Observation
from jaxfn._primitives.mark import mark
from jaxfn._protocol.context import SavedNames
from jaxfn._run.call import Call
from jaxfn._run.forward import Saved
from jaxfn._values.arrays import is_array_leaf
from jaxfn._values.layouts import Layout

_Run = Any  # a `jaxfn._run.run.Run`, which uses this module
_RunForward = Callable[..., tuple[_Run, list[Any], list[Any]]]
_RunRule = Callable[[Sequence[Any], Sequence[Any]], list[jax.Array | None]]


def observed_forward(run_forward: _RunForward, call: Call, inputs: Sequence[Any]) -> tuple[_Run, list[Any], list[Any]]:
    """What `run_forward` returns: the inputs of `forward`, its outputs, and the intermediates that it saved marked."""
    if OBSERVATION.value is not Observation.VALUES:
        return run_forward(inputs)
    inputs = _marked(inputs, call, "forward", "input", _input_names(call))
    with own_lines():
        run, outputs, intermediates = run_forward(inputs)
    names = [""] * len(intermediates)
    for source, name in zip(run.saved.sources, _saved_names(run.saved), strict=True):
        if source.kind == "intermediate":
            names[source.place] = name
    outputs = _marked(outputs, call, "forward", "output", _output_names(run))
    return run, outputs, _marked(intermediates, call, "forward", "saved", names)


def observed_backward(
    run: _Run, backward: _RunRule, residuals: Sequence[Any], cotangents: Sequence[Any]
) -> list[jax.Array | None]:
    """What a run's backward returns, and what it is given, marked."""
    names = _output_names(run), _input_names(run.call)
    return _observed_rule(run, "backward", backward, residuals, cotangents, ("grad_output", "gradient"), names)


def observed_jvp(run: _Run, jvp: _RunRule, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array | None]:
    """What a run's jvp returns, and what it is given, marked."""
    names = _input_names(run.call), _output_names(run)
    return _observed_rule(run, "jvp", jvp, residuals, tangents, ("tangent", "tangent"), names)


def _observed_rule(
    run: _Run,
    method: str,
    rule: _RunRule,
    residuals: Sequence[Any],
    given: Sequence[Any],
    roles: tuple[str, str],
    names: tuple[Sequence[str], Sequence[str]],
) -> list[jax.Array | None]:
    """What a rule returns; the roles and names are of what it is given, and of what it returns."""
    observation = OBSERVATION.value
    if observation not in (Observation.RESIDUALS, Observation.VALUES):
        return rule(residuals, given)
    labels = _residual_labels(run, method)  # none for what follows the residuals; see `reverse.Residuals`
    residuals = [*mark(residuals[: len(labels)], labels), *residuals[len(labels) :]]
    if observation is Observation.RESIDUALS:
        return rule(residuals, given)
    given = _marked(given, run.call, method, roles[0], names[0])
    with own_lines():
        returned = rule(residuals, given)
    return _marked(returned, run.call, method, roles[1], names[1])


def _residual_labels(run: _Run, method: str) -> list[Label]:
    """A label for each residual."""
    name = run.call.name
    labels: list[Label] = []
    for source, own_name, num_kept in zip(run.saved.sources, _saved_names(run.saved), run.num_kept(), strict=True):
        labels += [Label(name, method, "saved", own_name, source.kind, source.is_packed)] * num_kept
    return labels


def _marked(arrays: Sequence[Any], call: Call, method: str, role: str, names: Sequence[str]) -> list[Any]:
    """The same, those that are arrays marked."""
    places = [i for i, x in enumerate(arrays) if is_array_leaf(x) and not is_ref(x)]
    labelled = mark([arrays[i] for i in places], [Label(call.name, method, role, names[i]) for i in places])
    marked = list(arrays)
    for i, x in zip(places, labelled, strict=True):
        marked[i] = x
    return marked


def _input_names(call: Call) -> list[str]:
    """A name for each array leaf of the inputs."""
    return _leaf_names(call.form.names, call.layouts)


def _output_names(run: _Run) -> list[str]:
    """A name for each array leaf of the outputs."""
    layouts = run.outputs.layouts
    return _leaf_names(map(str, range(len(layouts))), layouts)


def _saved_names(saved: Saved) -> list[str]:
    """For each residual, by which names it was saved."""
    names: list[list[str]] = [[] for _ in saved.sources]
    for residual, name in zip(saved.order, _leaf_names(_names_on_ctx(saved.names), saved.layouts), strict=True):
        names[residual].append(name)
    return [", ".join(own) for own in names]


def _names_on_ctx(names: SavedNames) -> Iterable[str]:
    yield from (f"saved_tensors[{i}]" for i in range(names.num_tensors))
    yield from names.named
    yield from (f"saved_for_forward[{i}]" for i in range(names.num_for_forward or 0))
    yield from (f"ctx.{name}" for name in names.attributes)


def _leaf_names(names: Iterable[str], layouts: Sequence[Layout]) -> list[str]:
    """A name for each array leaf, of values that have these names."""
    found: list[str] = []
    for name, layout in zip(names, layouts, strict=True):
        tree = layout.merge_or_none(iter(range(layout.num_arrays)))
        found += [name + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return found
