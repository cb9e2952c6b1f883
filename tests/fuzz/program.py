"""Programs as trees: what is drawn, written out as source, and shrunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.fuzz.functions import FunctionSpec


@dataclass(frozen=True)
class Argument:
    """An argument of a program: its shape and dtype, and the seed of its values."""

    shape: tuple[int, ...]
    dtype: str
    seed: int


@dataclass(frozen=True)
class Operation:
    """A plain JAX operation of the table in `operations`."""

    name: str
    inputs: tuple[str, ...]
    output: str

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output,)


@dataclass(frozen=True)
class Call:
    """A call of a Function; `closed` are values that it closes over."""

    function: FunctionSpec
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    closed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """The options of a transformation; each kind reads its own.

    Attributes:
      in_axes: of vmap, one per input; of shard_map and sharded jit, 0 where the input is split over the devices.
      out_axes: of vmap, one per result.
      policy: of checkpoint.
      length: of the loops.
      devices: of shard_map and sharded jit.
      check_vma: of shard_map.
    """

    in_axes: tuple[int | None, ...] = ()
    out_axes: tuple[int | None, ...] = ()
    policy: str = "none"
    length: int = 2
    devices: int = 1
    check_vma: bool = True


@dataclass(frozen=True)
class Block:
    """A function: parameters, statements, and the names of what it returns."""

    parameters: tuple[str, ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Wrap:
    """A call of a block under a transformation; `label` names it in types and source."""

    kind: str
    label: str
    block: Block
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: Options = Options()


Statement = Operation | Call | Wrap


@dataclass(frozen=True)
class Measure:
    """The values and derivatives to compute.

    Attributes:
      name: a row of the table in `measures`.
      argnums: what is differentiated.
      is_jitted: whether the whole is under jit.
    """

    name: str
    argnums: tuple[int, ...]
    is_jitted: bool = False


@dataclass(frozen=True)
class Program:
    """Arguments, what is done with them, and what is measured. A stateful one is linear and counts its draws."""

    arguments: tuple[Argument, ...]
    block: Block
    measure: Measure
    stateful: bool = False

    @property
    def functions(self) -> list[FunctionSpec]:
        """The Functions that it calls, each once."""
        return list(dict.fromkeys(s.function for s in walk(self.block) if isinstance(s, Call)))

    @property
    def wraps(self) -> list[Wrap]:
        """The transformations in it, outer ones first."""
        return [s for s in walk(self.block) if isinstance(s, Wrap)]


def walk(block: Block) -> Iterator[Statement]:
    """Every statement of a block and of the blocks in it."""
    for statement in block.statements:
        yield statement
        if isinstance(statement, Wrap):
            yield from walk(statement.block)


def names_read(*statements: Statement) -> set[str]:
    """The names that statements read, those that their blocks and Functions close over included."""
    read: set[str] = set()
    for statement in statements:
        read.update(statement.inputs)
        if isinstance(statement, Call):
            read.update(statement.closed)
        if isinstance(statement, Wrap):
            read.update(names_read(*statement.block.statements), statement.block.results)
    return read
