"""Results of a torch module: outputs, gradients, updated buffers, and the values between its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxfn._check.arguments import as_arguments
from jaxfn._parity.backends import Measurements, draw_tensor, output_leaves, to_numpy, torch_grad
from jaxfn._parity.inputs import Array, Inputs
from jaxfn._reports import first_line
from jaxfn._torch.values.arrays import to_torch


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
      name: the name of the layer in its module; "" for the module.
      kind: the name of its class.
      parent: the index of the call that it is part of.
      inputs, outputs: the arrays that it was passed and that it returned, of floating-point or complex dtype.
      input_gradients, output_gradients: the gradients that it returned and received; `None` where torch has none.
      sources: for each input, the index of the call that returned it unchanged; -1 if there is none.
      depends: the indices of the calls that the outputs depend on.
      parameters: the names of the layer's own parameters.
    """

    name: str
    kind: str
    parent: int
    inputs: list[Array]
    outputs: list[Array]
    input_gradients: list[Array | None]
    output_gradients: list[Array | None]
    sources: list[int]
    depends: list[int]
    parameters: list[str]


@dataclass(frozen=True)
class ModuleRecord:
    """The results of a torch module.

    Attributes:
      name: the name of its class.
      args: the arguments, in double precision if the module runs in it.
      is_double: whether it ran in double precision.
      parameters, buffers: those before the call; frozen parameters count as buffers.
      aliases: further names of tied parameters and buffers, each with the name under which they are.
      outputs, gradients: the outputs, and the gradients of parameters and inputs, by their names.
      new_buffers: the buffers after the call.
      calls: the calls of layers, in the order in which they return.
      notes: why it is not in double precision, and whether it draws random numbers.
    """

    name: str
    args: tuple[Any, ...]
    is_double: bool
    parameters: Measurements
    buffers: Measurements
    aliases: dict[str, str]
    outputs: Measurements
    gradients: Measurements
    new_buffers: Measurements
    calls: list[LayerCall]
    notes: list[str]


def module_record(fields: dict[str, Any]) -> ModuleRecord:
    """Returns the record with these fields, which are plain Python values."""
    calls = [LayerCall(**call) for call in fields.pop("calls")]
    return ModuleRecord(calls=calls, **fields)


def record_module(module: Any, args: Sequence[Any]) -> ModuleRecord:
    """Runs a copy of a module, in double precision if it runs in it."""
    return record_in_double(module, [Inputs(as_arguments(args))], _record)


def record_in_double(
    module: Any, inputs: Sequence[Inputs], record: Callable[[Any, Sequence[Inputs], bool], Any]
) -> Any:
    """Returns what `record` returns for a copy of a module, inputs, and whether they are in double precision.

    They are, if the module runs in it. Notes say why it does not, and whether it draws random numbers.
    """
    import torch

    default, random_state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)  # of the constants that torch computes, as those of the port
    notes: list[str] = []
    try:
        recorded = record(copy.deepcopy(module).double(), [x.in_double() for x in inputs], True)
    except Exception as error:  # raised again by the next run, unless it is a matter of dtypes
        recorded = None
        notes.append(f"compared in the dtypes of the inputs, as torch does not run in float64: {first_line(error)}")
    finally:
        torch.set_default_dtype(default)
    recorded = record(copy.deepcopy(module), inputs, False) if recorded is None else recorded
    if not torch.equal(random_state, torch.get_rng_state()):
        notes.append("torch draws random numbers, which are not those of JAX: call .eval() of the layers that do")
    return replace(recorded, notes=notes)


def _record(module: Any, inputs: Sequence[Inputs], is_double: bool) -> ModuleRecord:
    parameters = {name: x for name, x in module.named_parameters() if x.requires_grad}
    buffers = {name: x for name, x in module.named_parameters() if not x.requires_grad} | dict(module.named_buffers())
    before = arrays_of(parameters), arrays_of(buffers)
    calls = _Calls(module)
    outputs, gradients = _run(module, inputs[0], parameters)
    calls.remove_hooks()
    return ModuleRecord(
        type(module).__name__,
        inputs[0].args,
        is_double,
        *before,
        aliases(module),
        {f"output {i}": to_numpy(y) for i, y in outputs.items()},
        arrays_of(gradients),
        arrays_of(buffers | dict(module.named_buffers())),
        calls.finish(),
        [],
    )


def aliases(module: Any) -> dict[str, str]:
    """Returns the names of tied parameters and buffers that are not their first ones, each with the first one."""
    first: dict[int, str] = {}
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    owners = {name: first.setdefault(id(x), name) for name, x in everything}
    return {name: owner for name, owner in owners.items() if name != owner}


def arrays_of(tensors: Mapping[str, Any]) -> Measurements:
    return {name: to_numpy(x) for name, x in tensors.items()}


def _run(module: Any, inputs: Inputs, parameters: Mapping[str, Any]) -> tuple[dict[int, Any], dict[str, Any]]:
    """Returns the outputs, and the gradients of inputs and parameters for random grad_outputs."""
    import torch

    leaves = [to_torch(x).requires_grad_() for x in inputs.values]
    # Copies, since a layer may mutate its input, which autograd forbids for leaves.
    returned = inputs.call(module, to_torch, [leaf.clone() for leaf in leaves])
    returned = dict(returned) if isinstance(returned, Mapping) else returned
    outputs = output_leaves(returned, type(module).__name__, lambda leaf: isinstance(leaf, torch.Tensor))
    outputs = {i: y for i, y in outputs.items() if isinstance(y, torch.Tensor)}
    if not outputs:
        raise ValueError(f"paritycheck: {type(module).__name__} returned no tensor for these inputs")
    wanted = {**parameters, **dict(zip(inputs.names, leaves, strict=True))}
    differentiated = {i: y for i, y in outputs.items() if y.requires_grad}
    cotangents = [draw_tensor("grad_output", i, y) for i, y in differentiated.items()]
    gradients = torch_grad(list(differentiated.values()), list(wanted.values()), cotangents)
    return {i: y.detach().clone() for i, y in outputs.items()}, dict(zip(wanted, gradients, strict=True))


def _tensors_in(value: Any) -> Iterator[Any]:
    """Yields the tensors in tuples, lists and mappings, in JAX's order of leaves."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        ordered = sorted(value) if type(value) is dict else value
        for key in ordered:
            yield from _tensors_in(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)


class _Calls:
    """The calls of a module's layers while its hooks are active."""

    def __init__(self, module: Any) -> None:
        self._active: list[dict[str, Any]] = []
        self._done: list[dict[str, Any]] = []
        self._producers: dict[int, tuple[Any, int]] = {}  # by the id of a tensor: the tensor, the call
        self._hooks: list[Any] = []
        names = {id(x): name for name, x in module.named_parameters()}  # one for tied parameters
        for name, layer in module.named_modules():
            own = [names[id(x)] for x in layer.parameters(recurse=False)]
            fields = {"name": name, "kind": type(layer).__name__, "parameters": own}
            self._hooks += [
                layer.register_forward_pre_hook(self._entering(fields), with_kwargs=True),
                layer.register_forward_hook(self._leaving, with_kwargs=True),
            ]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entering(self, fields: dict[str, Any]) -> Any:
        def hook(_layer: Any, args: Any, kwargs: Any) -> Any:
            call = fields | {"inputs": [], "sources": [], "input_gradients": [], "outer": self._active[-1:]}
            self._active.append(call)
            return self._aliased(args, call), self._aliased(kwargs, call)

        return hook

    def _aliased(self, value: Any, call: dict[str, Any]) -> Any:
        """Returns views of differentiable tensors, whose gradients are the contributions of this call alone."""
        import torch

        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(self._aliased(item, call) for item in value)
        if type(value) is dict:
            return {key: self._aliased(item, call) for key, item in value.items()}
        if not isinstance(value, torch.Tensor) or not _is_inexact(value):
            return value
        alias = value.view_as(value) if value.requires_grad else value
        producer = self._producers.get(id(value), (None, -1))[1]
        self._producers[id(alias)] = alias, producer
        call["inputs"].append(to_numpy(value))
        call["sources"].append(producer)
        _record_gradient(alias, call["input_gradients"])
        return alias

    def _leaving(self, _layer: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        call = self._active.pop()
        call |= {"outputs": [], "output_gradients": [], "nodes": []}
        for tensor in filter(_is_inexact, _tensors_in(output)):
            self._producers[id(tensor)] = tensor, len(self._done)
            call["outputs"].append(to_numpy(tensor))
            call["nodes"].append(tensor.grad_fn)
            _record_gradient(tensor, call["output_gradients"])
        self._done.append(call)

    def finish(self) -> list[LayerCall]:
        """Returns the calls, after the gradients were computed."""
        numbers = {id(call): i for i, call in enumerate(self._done)}
        owners = {node: i for i, call in reversed([*enumerate(self._done)]) for node in call["nodes"] if node}
        depends: list[set[int]] = []
        for i, call in enumerate(self._done):
            found = _reached(call["nodes"], owners) - {i}
            depends.append(found.union(*(depends[j] for j in found if j < i)))
        return [
            LayerCall(
                parent=numbers[id(call["outer"][0])] if call["outer"] else -1,
                depends=sorted(j for j in depends[i] if j < i),
                input_gradients=[g[0] if g else None for g in call["input_gradients"]],
                output_gradients=[g[0] if g else None for g in call["output_gradients"]],
                **{name: call[name] for name in ("name", "kind", "inputs", "outputs", "sources", "parameters")},
            )
            for i, call in enumerate(self._done)
        ]


def _is_inexact(tensor: Any) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _record_gradient(tensor: Any, gradients: list[list[Array]]) -> None:
    found: list[Array] = []
    gradients.append(found)

    def record(gradient: Any) -> None:
        if not found:
            found.append(to_numpy(gradient))

    if tensor.requires_grad:
        tensor.register_hook(record)


def _reached(nodes: Sequence[Any], owners: Mapping[Any, int]) -> set[int]:
    """Returns the calls whose outputs the nodes of an autograd graph depend on."""
    pending, seen, found = list(nodes), set[Any](), set[int]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in owners:
            found.add(owners[node])
        pending += [following for following, _ in node.next_functions]
    return found
