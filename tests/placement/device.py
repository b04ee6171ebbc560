"""A stand-in for a GPU: tensors in host memory that are marked as the device's, so that what a GPU would refuse or wait
for is seen without one.

Two modes do it. `_Calls` takes the device out of Python's calls and marks what they make; `_Operations` sees every
operation below autograd: what has an operand of the device is on the device, and an operand of more than no dimensions
from host memory beside one of the device is what CUDA refuses. Owns the marks and the record of waits; what runs under
it is in steps.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("privateuseone", 0)
HOST = torch.device("cpu")
READ, COPY, SYNC, GLOO = "read", "copy", "sync", "gloo"
"""Of the device by the host, which waits for all work before it; from pageable host memory, which waits too; an
explicit synchronization; a collective in host memory, which waits for the other ranks' hosts."""
AFTER_UPDATE = " after the update was launched"
"""In the names of waits."""
READERS = frozenset({"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__"})
"""Methods that give Python numbers."""
NAMES = (str, torch.device)
"""What names a device in a call."""
ALONE = frozenset({"__deepcopy__", "one_hot"})
"""Whose parts would be taken for waits that a GPU's versions do not have."""
aten = torch.ops.aten
COUNTED = frozenset(
    {
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.equal.default,
        aten.is_nonzero.default,
        aten.allclose.default,
        aten.bincount.default,
        aten.histc.default,
        aten.multinomial.default,
        aten.normal.Tensor_Tensor,
        aten.normal.float_Tensor,
        aten._to_sparse.default,
    }
)
"""Operations whose result has a shape, or is a number, or whose arguments are checked, for which the host has to
wait."""
WRAPPERS = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}
"""torch.distributed's tensors without memory -> where what they hold on this rank is."""
CROSSING = frozenset({aten.copy_.default, aten._to_copy.default, aten.set_.source_Storage})
OURS = ("megaswift", "megatron", "transformer_engine", "transformers", "tests.placement.steps")


class WrongDevice(AssertionError):
    """An operation with operands in both memories, which CUDA refuses."""


class ReadTooEarly(AssertionError):
    """The host uses the target of a copy that it has not waited for."""


class StandIn:
    """The marks of one process, and the waits so far."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}
        self.pinned: dict[int, StorageWeakRef] = {}
        self.pending: dict[int, StorageWeakRef] = {}
        """Targets in host memory of copies that run until the next wait."""
        self.waits: Counter[str] = Counter()
        self.launched = ""
        """What the host has launched in the scenario, where that matters: part of the names of waits."""
        self.quiet = False
        self.recorded = self.reached = 0  # events, and the last one that the host has seen (collectives.py)

    def mark(self, value: Any) -> Any:
        """Every tensor in `value` is on the device from now on."""
        for tensor in tensors_in(value):
            _remember(self.storages, tensor)
        return value

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return _known(self.storages, tensor)

    def wait(self, kind: str) -> None:
        """Counts a wait of the host, under the innermost function that is not torch's."""
        if not self.quiet:
            self.waits[f"{kind} {_caller()}{self.launched}"] += 1
            if kind in (READ, SYNC):
                self.pending, self.reached = {}, self.recorded

    def synchronized(self, *_: Any, **__: Any) -> None:
        """In place of `torch.cuda.synchronize` and its kin."""
        self.wait(SYNC)

    def early(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the host has not waited for one of the tensors."""
        return bool(self.pending) and not self.quiet and any(_known(self.pending, t) for t in tensors)

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that stands in for a kernel: what happens inside is the device's own affair."""
        held = any(self.holds(t) for t in tensors_in((args, kwargs)))
        with paused(self):
            result = function(*args, **kwargs)
        return self.mark(result) if held else result

    @contextlib.contextmanager
    def running(self) -> Iterator[StandIn]:
        """The device is there."""
        with _Calls(self), _Operations(self):
            yield self

    def counted(self) -> dict[str, int]:
        """The waits since the last call."""
        found, self.waits, self.launched = dict(sorted(self.waits.items())), Counter(), ""
        return found


def tensors_in(value: Any) -> list[Tensor]:
    """Those of an operation's arguments or results, in lists, tuples and dicts: pytree's flattening takes twice as
    long, and is asked for at every operation."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    found: list[Tensor] = []
    for part in value:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, list | tuple | dict):
            found += tensors_in(part)
    return found


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a wrapper without memory of its own has on this rank."""
    attribute = WRAPPERS.get(type(tensor).__name__)
    return tensor if attribute is None else _in_memory(getattr(tensor, attribute))


def _remember(table: dict[int, StorageWeakRef], tensor: Tensor) -> None:
    tensor = _in_memory(tensor)
    with contextlib.suppress(NotImplementedError, RuntimeError):  # of tensors without storage
        ref = StorageWeakRef(tensor.untyped_storage())
        if ref.cdata not in table:  # the weak reference keeps the address from being used again
            table[ref.cdata] = ref


def _known(table: dict[int, StorageWeakRef], tensor: Tensor) -> bool:
    tensor = _in_memory(tensor)
    try:
        key = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False
    return key in table


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OURS):
            return f"{module}:{frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "python"


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward, which asks the modes again before it begins."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (grad_tensors,) if isinstance(grad_tensors, Tensor) or grad_tensors is None else tuple(grad_tensors)
    grads = torch.autograd._make_grads(tensors, given or (None,) * len(tensors), is_grads_batched=False)
    keep = create_graph if retain_graph is None else retain_graph
    torch.autograd.graph._engine_run_backward(
        tensors, grads, keep, create_graph, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True
    )


def _is_stand_in(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == DEVICE.type
    return isinstance(value, str) and value.partition(":")[0] == DEVICE.type


def _is_host(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cpu"
    return isinstance(value, str) and value.partition(":")[0] == "cpu"


class _Calls(TorchFunctionMode):
    """Calls of torch from Python: devices in their arguments, and tensors read as numbers."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self.stand_in = stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if type(kwargs.get("device")) is int:  # a GPU by its number
            kwargs["device"] = DEVICE
        stand_in, name = self.stand_in, getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "_parse_to" or func is torch.device:  # a module's, which calls `to` for each tensor, and a name's
            return func(*args, **kwargs)
        if func is torch.autograd.backward or func is Tensor.backward:
            with self:  # functions written in Python run inside
                kwargs["grad_tensors"] = kwargs.pop("gradient", kwargs.pop("grad_tensors", None))
                return _backward(*args, **kwargs)
        if name == "__get__" and first is not None:
            return self._attribute(func, first, args, kwargs)
        if name == "type" and first is not None and len(args) == 1 and not kwargs and DEVICE.type == "cuda":
            kind = func(*args)
            return kind.replace("torch.", "torch.cuda.") if stand_in.holds(first) else kind
        if name == "pin_memory":
            if stand_in.holds(first):
                raise WrongDevice(f"pin_memory of a tensor of the device in {_caller()}")
            copy = args[0].clone()
            _remember(stand_in.pinned, copy)
            return copy
        if kwargs.get("pin_memory"):  # of a factory: there is none without CUDA
            made = func(*args, **(kwargs | {"pin_memory": False}))
            _remember(stand_in.pinned, made)
            return made
        if first is not None and (name in ALONE or name in READERS):
            return self._alone(func, name, args, kwargs)
        if name == "cuda" and first is not None:
            name, args, func = "to", (first, DEVICE), Tensor.to
        if name == "new_tensor" and first is not None:
            where = DEVICE if stand_in.holds(first) else HOST
            func, name, args, kwargs = (
                torch.tensor,
                "tensor",
                args[1:],
                {"dtype": first.dtype, "device": where} | kwargs,
            )
        if name == "type_as" and first is not None:
            func, name, args = Tensor.to, "to", (first, args[1])
        where = [v for v in (*args, *kwargs.values()) if isinstance(v, NAMES)]
        other = args[1] if name == "to" and len(args) > 1 and isinstance(args[1], Tensor) else None
        onto = any(_is_stand_in(v) for v in where) or (other is not None and stand_in.holds(other))
        off = name == "cpu" or (not onto and name == "to" and any(_is_host(v) for v in where))
        if not onto and not off:
            return func(*args, **kwargs)
        args = tuple(HOST if _is_stand_in(v) else v for v in args)
        kwargs = {k: HOST if _is_stand_in(v) else v for k, v in kwargs.items()}
        return self._across(func, name, onto, args, kwargs)

    def _attribute(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        """`tensor.device` and the like: the stand-in's for what it holds."""
        owner = getattr(func, "__self__", None)
        if owner in (Tensor.device, Tensor.is_cuda) and self.stand_in.holds(tensor):
            return DEVICE if owner is Tensor.device else True
        return func(*args, **kwargs)

    def _alone(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Functions whose parts are not looked at: what a GPU's version waits for is known."""
        stand_in, first = self.stand_in, args[0]
        held = stand_in.holds(first)
        if name != "numpy" and stand_in.early([first]):
            raise ReadTooEarly(f"{name} in {_caller()}")
        if held and (name in READERS or (name == "one_hot" and kwargs.get("num_classes", [*args, -1][1]) == -1)):
            stand_in.wait(READ)
        if not held:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), paused(stand_in):
            result = func(*args, **kwargs)
        return result if name in READERS else stand_in.mark(result)

    def _across(self, func: Any, name: str, onto: bool, args: Any, kwargs: Any) -> Any:
        """A tensor that is made on the device, or brought there, or brought back."""
        stand_in = self.stand_in
        source = args[0] if name in ("to", "cpu") else None
        held = source is not None and stand_in.holds(source)
        if source is None:
            made = func(*args, **kwargs)
            if name in ("tensor", "as_tensor", "asarray"):
                stand_in.wait(COPY)
            return stand_in.mark(made)
        if held == onto:
            return func(*args, **kwargs)
        aside = bool(kwargs.get("non_blocking"))
        if held and not aside:
            stand_in.wait(READ)
        elif onto and not (aside and _known(stand_in.pinned, source)):
            stand_in.wait(COPY)
        with torch._C.DisableTorchFunction(), paused(stand_in):
            moved = func(*args, **kwargs)
            moved = moved.clone() if moved.untyped_storage()._cdata == source.untyped_storage()._cdata else moved
        if onto:
            stand_in.mark(moved)
        else:
            stand_in.storages.pop(moved.untyped_storage()._cdata, None)
            if aside:  # to memory that torch has pinned
                _remember(stand_in.pinned, moved)
                _remember(stand_in.pending, moved)
        return moved


@contextlib.contextmanager
def paused(stand_in: StandIn) -> Iterator[None]:
    """Copies between the memories are no operation with two operands."""
    before, stand_in.quiet = stand_in.quiet, True
    try:
        yield
    finally:
        stand_in.quiet = before


class _Operations(TorchDispatchMode):
    """Every operation, those of the backward pass too."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self.stand_in = stand_in

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's guard against it costs as much as looking at the operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(kind.__name__ in WRAPPERS for kind in types):
            return NotImplemented  # its own operations on the parts of this rank come here
        stand_in, kwargs = self.stand_in, kwargs or {}
        tensors = tensors_in((args, kwargs)) if kwargs else tensors_in(args)
        if func.namespace == "_c10d_functional":
            return self._collected(func, args, kwargs, tensors)
        held = [t for t in tensors if stand_in.holds(t)]
        if stand_in.early(tensors) and func is not aten.copy_.default and not func.is_view:
            raise ReadTooEarly(f"{func} in {_caller()}")
        if stand_in.quiet or not held:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._sent(func, args, kwargs, tensors)
        host = (
            [] if len(held) == len(tensors) else [t for t in tensors if t.dim() and t.numel() and not stand_in.holds(t)]
        )
        if (
            func is aten.repeat_interleave.Tensor
            and kwargs.get("output_size") is None
            or func is aten._local_scalar_dense.default
            or func in COUNTED
        ):
            stand_in.wait(READ)
        elif func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            indices = [i for i in args[1] if i is not None]
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
                stand_in.wait(READ)
            host = [t for t in host if not any(t is i for i in indices)]
            if any(not stand_in.holds(i) and i.dim() for i in indices):
                stand_in.wait(COPY)
        if func is aten.copy_.default:
            return self._copied(func, args, kwargs)
        if host and func not in CROSSING:
            shapes = [f"{'device' if stand_in.holds(t) else 'host'} {tuple(t.shape)}" for t in tensors]
            raise WrongDevice(f"{func} of {', '.join(shapes)} in {_caller()}")
        return stand_in.mark(func(*args, **kwargs))

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`target.copy_(source)`: each stays where it is."""
        stand_in, target, source = self.stand_in, args[0], args[1]
        there, here = stand_in.holds(target), stand_in.holds(source)
        aside = [*args, kwargs.get("non_blocking")][2] and _known(stand_in.pinned, target if here else source)
        if here and not there and aside:
            _remember(stand_in.pending, target)
        elif here and not there:
            stand_in.wait(READ)
        elif there and not here and not aside:
            stand_in.wait(COPY)
        return func(*args, **kwargs)

    def _collected(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """A collective of a DTensor, whose group takes tensors of both memories."""
        stand_in = self.stand_in
        held = any(map(stand_in.holds, tensors))
        if not held and not stand_in.quiet and func.overloadpacket.__name__ != "wait_tensor":
            stand_in.wait(GLOO)
        result = func(*args, **kwargs)
        return stand_in.mark(result) if held else result

    def _sent(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """A message between ranks: NCCL takes tensors of the device only."""
        if any(not self.stand_in.holds(t) for t in tensors):
            raise WrongDevice(f"{func} of a tensor in host memory in {_caller()}")
        return func(*args, **kwargs)
