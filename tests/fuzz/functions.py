"""The styles of a Function: source of a formula's Function, and of its twin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fuzz.formulas import FORMULAS, Formula, Saving

STYLES = ("combined", "separate", "decorator", "decorator separate", "by name")
SAVE_STYLES = ("positional", "named", "attributes")
MODES = ("reverse", "both", "generated", "forward")
VMAP_RULES = ("", "first", "last")


@dataclass(frozen=True)
class FunctionSpec:
    """A Function.

    Attributes:
      formula: a name in `FORMULAS`.
      saving: a name among the formula's savings.
      style: one of `STYLES`.
      save_style: how values are saved, one of `SAVE_STYLES`.
      modes: `backward`, `backward` and `jvp`, `backward` and `generate_jvp_rule`, or `jvp`.
      guards: whether `backward` looks at `needs_input_grad`.
      saves_needed: whether what is saved depends on `needs_input_grad` too.
      materialize: whether missing gradients come as zeros.
      vmap_rule: where the Function's `vmap` puts the batch, "" for none.
      packed: whether the parameters come in one dict.
      passes_statics: whether static arguments are passed in the call, and not left to their defaults.
    """

    formula: str
    saving: str
    style: str = "combined"
    save_style: str = "positional"
    modes: str = "reverse"
    guards: bool = False
    saves_needed: bool = False
    materialize: bool = True
    vmap_rule: str = ""
    packed: bool = False
    passes_statics: bool = False

    @property
    def mathematics(self) -> Formula:
        """The formula itself."""
        return FORMULAS[self.formula]

    @property
    def rules(self) -> Saving:
        """The saved values, and the rules that use them."""
        return self.mathematics.savings[self.saving]

    @property
    def is_separate(self) -> bool:
        """Whether forward takes no ctx."""
        return self.style.endswith("separate")

    @property
    def has_forward_mode(self) -> bool:
        """Whether `jax.jvp` works."""
        return self.modes != "reverse"

    def is_possible(self) -> bool:
        """Whether these choices go together."""
        formula, saved = self.mathematics, set(self.rules.names)
        steps = {name for name, _ in formula.steps}
        is_class = self.style in ("combined", "separate")
        return not (
            (self.vmap_rule and (not self.is_separate or formula.closed or self.packed))
            or (self.packed and (not is_class or not self.materialize or formula.statics))
            or (self.modes == "generated" and not is_class)
            or (self.modes != "reverse" and self.style == "by name")
            or (self.save_style == "positional" and "factor" in saved)  # a Python number
            or (self.passes_statics and not formula.statics)
            or (self.saves_needed and (not self.guards or self.modes != "reverse" or formula.stateful))
            or (formula.stateful and self.is_separate and steps & saved)  # setup_context would draw again
        )


def write_function(spec: FunctionSpec, name: str) -> list[str]:
    """Lines that define the Function under this name."""
    if spec.style in ("combined", "separate"):
        lines = [f"class {name}(jaxfn.Function):"]
        if spec.modes == "generated":
            lines += ["    generate_jvp_rule = True", ""]
        for method in _methods(spec, name, f"{name}.forward"):
            lines += ["    @staticmethod", *indented(method), ""]
        return lines[:-1]
    if spec.style == "by name":
        forward, backward = _methods(spec, name, "")
        return [
            *_renamed(forward, name), "", *_renamed(backward, f"{name}_backward"), "",
            f"{name} = jaxfn.autograd_function(forward={name}, backward={name}_backward)",
        ]  # fmt: skip
    forward, *rules = _methods(spec, name, f"{name}.Function.forward")
    lines = ["@jaxfn.function", *_renamed(forward, name)]
    for rule in rules:
        lines += ["", f"@{name}.{_name_of(rule)}", *_renamed(rule, "_")]
    return lines


def write_twin(spec: FunctionSpec, name: str) -> list[str]:
    """Lines that define plain JAX with the Function's derivatives at every order."""
    formula = spec.mathematics
    lines = [f"return {', '.join(formula.twin or formula.output_names)}"]
    for line in reversed(formula.body):
        if re.search(rf"\b{line.partition(' = ')[0]}\b", "\n".join(lines)):
            lines.insert(0, line)
    return [f"def {name}({_signature(spec)}):", *indented([*_unpacked_dict(spec), *lines])]


def write_hand_written(spec: FunctionSpec, name: str) -> list[str]:
    """Lines that define the `jax.custom_vjp` that a JAX user would write."""
    formula, saved = spec.mathematics, spec.rules.names
    signature, body = _signature(spec), [*_unpacked_dict(spec), *formula.body]
    results = ", ".join(formula.output_names)
    grads = [str(grad) for grad in spec.rules.grads]
    returned = _dict(formula.parameters, grads) if spec.packed else ", ".join(grads)
    unpacked = [f"{tuple_of(saved)} = residuals"] if saved else []
    cotangents = [f"g{i}" for i in range(len(formula.output_names))]
    unpacked += [f"{tuple_of(cotangents) if len(cotangents) > 1 else 'g0'} = g"]
    return [
        "@jax.custom_vjp", f"def {name}({signature}):", *indented([*body, f"return {results}"]), "",
        f"def {name}_fwd({signature}):", *indented([*body, f"return ({results}), {tuple_of(saved)}"]), "",
        f"def {name}_bwd(residuals, g):", *indented([*unpacked, f"return ({returned},)"]), "",
        f"{name}.defvjp({name}_fwd, {name}_bwd)",
    ]  # fmt: skip


def write_hand_written_in_forward_mode(spec: FunctionSpec, name: str) -> list[str]:
    """Lines that define the `jax.custom_jvp` that a JAX user would write."""
    formula, unpacked = spec.mathematics, _unpacked_dict(spec)
    results = ", ".join(formula.output_names)
    names = [*(["packed"] if spec.packed else formula.parameters), *formula.static_names]
    tangents = [f'd{name} = dpacked["{name}"]' for name in formula.parameters] if spec.packed else []
    primals_and_tangents = [f"{tuple_of(names)} = primals", f"{tuple_of([f'd{n}' for n in names])} = tangents"]
    return [
        "@jax.custom_jvp", f"def {name}({_signature(spec)}):",
        *indented([*unpacked, *formula.body, f"return {results}"]), "",
        f"@{name}.defjvp", f"def {name}_jvp(primals, tangents):",
        *indented([*primals_and_tangents, *unpacked, *tangents, *formula.body]),
        f"    return ({results}), ({', '.join(map(str, spec.rules.tangents))})",
    ]  # fmt: skip


def write_factory(lines: Sequence[str], spec: FunctionSpec, name: str, value: str) -> list[str]:
    """Lines that define `make_<name>`, which makes the function for what it closes over, or the lines themselves."""
    closed = spec.mathematics.closed
    if not closed:
        return list(lines)
    return [f"def make_{name}({', '.join(closed)}):", *indented(lines), f"    return {value}"]


def value_of(spec: FunctionSpec, name: str) -> str:
    """The expression that is called."""
    return f"{name}.apply" if spec.style in ("combined", "separate") else name


def arguments_of(spec: FunctionSpec, inputs: Sequence[str]) -> str:
    """The source between the parentheses of a call."""
    formula = spec.mathematics
    if spec.packed:
        return _dict(formula.parameters, inputs)
    statics = [value for _, value in formula.statics] if spec.passes_statics else []
    return ", ".join([*inputs, *statics])


def _methods(spec: FunctionSpec, name: str, forward: str) -> list[list[str]]:
    """The methods as functions, each its lines; `forward` is how `vmap` calls forward."""
    methods = [_forward(spec)]
    if spec.is_separate:
        methods.append(_setup_context(spec))
    if spec.modes != "forward":
        methods.append(_backward(spec))
    if spec.modes in ("both", "forward"):
        methods.append(_jvp(spec))
    if spec.vmap_rule:
        methods.append(_vmap(spec, forward))
    return methods


def _forward(spec: FunctionSpec) -> list[str]:
    formula = spec.mathematics
    ctx, saves = ("", []) if spec.is_separate else ("ctx, ", _saves(spec))
    lines = [*_unpacked_dict(spec), *formula.body, *saves, f"return {', '.join(formula.output_names)}"]
    return [f"def forward({ctx}{_signature(spec)}):", *indented(lines)]


def _setup_context(spec: FunctionSpec) -> list[str]:
    formula = spec.mathematics
    inputs = ["packed"] if spec.packed else [*formula.parameters, *formula.static_names]
    lines = [f"{tuple_of(inputs)} = inputs", *_unpacked_dict(spec), f"{', '.join(formula.output_names)} = output"]
    if {name for name, _ in formula.steps}.intersection(spec.rules.names):
        lines += formula.body[: len(formula.steps)]
    return ["def setup_context(ctx, inputs, output):", *indented([*lines, *_saves(spec)])]


def _saves(spec: FunctionSpec) -> list[str]:
    """The lines that save values on ctx."""
    formula, names = spec.mathematics, spec.rules.names
    lines = [f"ctx.mark_non_differentiable({', '.join(f'y{i}' for i in formula.marked)})"] if formula.marked else []
    if not spec.materialize:
        lines.append("ctx.set_materialize_grads(False)")
        for kind, values in (("inputs", formula.parameters), ("outputs", formula.output_names)):
            lines.append(f"ctx.of_{kind} = {tuple_of([f'({v}.shape, str({v}.dtype))' for v in values])}")
    values = {name: _if_needed(spec, name) if spec.saves_needed else name for name in names}
    if spec.save_style == "attributes":
        return [*lines, *(f"ctx.{name} = {value}" for name, value in values.items())]
    saved = [f"{name}={value}" if spec.save_style == "named" else value for name, value in values.items()]
    return [*lines, f"ctx.save_for_backward({', '.join(saved)})"] if saved else lines


def _if_needed(spec: FunctionSpec, name: str) -> str:
    """The expression of a saved value that is `None` where no gradient that is needed reads it."""
    readers = [i for i, grad in enumerate(spec.rules.grads) if grad and re.search(rf"\b{name}\b", grad)]
    flags = [f"ctx.needs_input_grad[{0 if spec.packed else i}]" for i in readers]
    return f"{name} if {' or '.join(flags) or 'False'} else None"


def _unpacked_saves(spec: FunctionSpec) -> list[str]:
    names = spec.rules.names
    if spec.save_style == "attributes":
        return [f"{name} = ctx.{name}" for name in names]
    if spec.save_style == "named":
        return [f"{name} = ctx.saved_variables.{name}" for name in names]
    return [f"{tuple_of(names)} = ctx.saved_tensors"] if names else []


def _zeros(spec: FunctionSpec, names: Sequence[str], kind: str) -> list[str]:
    """Lines that make zeros of gradients or tangents that are `None`."""
    if spec.materialize:
        return []
    return [f"{name} = jnp.zeros(*ctx.of_{kind}[{i}]) if {name} is None else {name}" for i, name in enumerate(names)]


def _backward(spec: FunctionSpec) -> list[str]:
    formula = spec.mathematics
    outputs = [f"g{i}" for i in range(len(formula.outputs))]
    lines = [*_unpacked_saves(spec), *_zeros(spec, outputs, "outputs")]
    grads = [f"g_{parameter}" for parameter in formula.parameters]
    for i, (name, grad) in enumerate(zip(grads, spec.rules.grads, strict=True)):
        guard = f" if ctx.needs_input_grad[{0 if spec.packed else i}] else None"
        lines.append(f"{name} = {grad}{guard if spec.guards and grad else ''}")
    if spec.packed or spec.style == "by name":
        returned = _dict(formula.parameters, grads)
    else:
        returned = ", ".join([*grads, *("None" for _ in formula.statics)])
    return [f"def backward(ctx, {', '.join(outputs)}):", *indented([*lines, f"return {returned}"])]


def _jvp(spec: FunctionSpec) -> list[str]:
    formula = spec.mathematics
    tangents = [f"d{name}" for name in formula.parameters]
    parameters = ["packed"] if spec.packed else [*tangents, *(f"d{name}" for name in formula.static_names)]
    unpacked = [f'd{name} = packed["{name}"]' for name in formula.parameters] if spec.packed else []
    lines = [*_unpacked_saves(spec), *unpacked, *_zeros(spec, tangents, "inputs")]
    returned = ", ".join(str(tangent) for tangent in spec.rules.tangents)
    return [f"def jvp(ctx, {', '.join(parameters)}):", *indented([*lines, f"return {returned}"])]


def _vmap(spec: FunctionSpec, forward: str) -> list[str]:
    formula = spec.mathematics
    names = ", ".join([*formula.parameters, *formula.static_names])
    axis = {"first": "0", "last": "-1"}[spec.vmap_rule]
    axes = axis if len(formula.outputs) == 1 else tuple_of([axis] * len(formula.outputs))
    return [
        f"def vmap(info, in_dims, {names}):",
        f"    return jax.vmap({forward}, in_dims, {axes})({names}), {axes}",
    ]


def _signature(spec: FunctionSpec) -> str:
    formula = spec.mathematics
    parameters = ["packed"] if spec.packed else formula.parameters
    return ", ".join([*parameters, *(f"{name}={value}" for name, value in formula.statics)])


def _unpacked_dict(spec: FunctionSpec) -> list[str]:
    return [f'{name} = packed["{name}"]' for name in spec.mathematics.parameters] if spec.packed else []


def _name_of(function: Sequence[str]) -> str:
    return function[0].removeprefix("def ").partition("(")[0]


def _renamed(function: Sequence[str], name: str) -> list[str]:
    return [function[0].replace(f"def {_name_of(function)}(", f"def {name}(", 1), *function[1:]]


def indented(lines: Sequence[str]) -> list[str]:
    """Lines indented by one more level."""
    return [f"    {line}" if line else line for line in lines]


def tuple_of(items: Sequence[str]) -> str:
    """The expression of a tuple."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _dict(names: Sequence[str], values: Sequence[str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in zip(names, values, strict=True)) + "}"
