"""Python values as JSON that keeps their types, so that nothing a peer sent is ever unpickled.

Tensors don't travel here: :func:`encode` takes them out into a list and leaves a reference, and
:func:`decode` puts tensors back. What is neither a tensor nor plain data is a ``TypeError`` that
names where it was found.
"""

import enum
import json
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

Json: TypeAlias = Any
"""None, booleans, numbers, strings, and lists and string-keyed dicts of these."""

_TAG = "$"


def encode(value: Any, tensors: list[torch.Tensor], path: str = "value") -> Json:
    """Encodes plain data; every tensor met is appended to ``tensors`` and referred to.

    Args:
        value: ``None``, numbers, strings, ``torch.dtype``, ``torch.device``, ``torch.Size``, plain
            tensors, and lists, tuples and dicts of these.
        tensors: receives the tensors, detached, in the order in which they were met.
        path: how a message calls ``value``.

    Raises:
        TypeError: for anything else, tensor subclasses included, naming its path.
    """

    def take_tensor(tensor: torch.Tensor, where: str) -> Json:
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
            raise _not_plain(tensor, where)
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(
                f"{where} is a tensor with layout {tensor.layout} on device {tensor.device}; only "
                "dense tensors that have values can be sent to another rank"
            )
        tensors.append(tensor.detach().resolve_conj().resolve_neg())
        return {_TAG: "tensor", "at": len(tensors) - 1}

    def refuse(other: Any, where: str) -> Json:
        raise _not_plain(other, where)

    return _encode(value, path, _Rules(take_tensor, refuse, list))


def describe(value: Any) -> Json:
    """Encodes a value for comparison between ranks: equal values give equal JSON.

    Small CPU tensors stand for their values; other tensors for dtype and shape only (reading them
    would wait for a device). Numbers of other types (NumPy's are usual as learning rates), enums,
    strings and bytes stand for type and value; other objects for the name of their type. The order
    of a dict doesn't matter.
    """
    return _encode(value, "", _DESCRIBING)


def decode(encoded: Json, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """Gives back what :func:`encode` was given, with ``tensors`` in the places of the originals."""
    if isinstance(encoded, list):
        return [decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    match encoded[_TAG]:
        case "tensor":
            return tensors[encoded["at"]]
        case "float":
            return float.fromhex(encoded["hex"])
        case "complex":
            return complex(decode(encoded["real"]), decode(encoded["imag"]))
        case "dtype":
            return getattr(torch, encoded["name"])
        case "device":
            return torch.device(encoded["name"])
        case "tuple":
            return tuple(decode(encoded["items"], tensors))
        case "size":
            return torch.Size(decode(encoded["items"], tensors))
        case "dict":
            items = decode(encoded["items"], tensors)
            return dict(zip(items[::2], items[1::2], strict=True))
        case tag:
            raise ValueError(
                f"unknown tag {tag!r} in a peer's message; do all ranks run the same version?"
            )


class _Rules(NamedTuple):
    """What encoding does with tensors, with unknown types, and with the items of a dict."""

    on_tensor: Callable[[torch.Tensor, str], Json]
    on_other: Callable[[Any, str], Json]
    arrange: Callable[[list[tuple[Json, Json]]], list[tuple[Json, Json]]]


def _encode(value: Any, path: str, rules: _Rules) -> Json:
    def encode_items(tag: str, items: Sequence[Any]) -> Json:
        return {
            _TAG: tag,
            "items": [
                _encode(item, f"{path}[{position}]", rules) for position, item in enumerate(items)
            ],
        }

    if value is None or type(value) in {bool, int, str}:
        return value
    if isinstance(value, torch.Tensor):
        return rules.on_tensor(value, path)
    match value:
        case float() if type(value) is float:
            return {_TAG: "float", "hex": value.hex()}
        case complex():
            return {
                _TAG: "complex",
                "real": {_TAG: "float", "hex": value.real.hex()},
                "imag": {_TAG: "float", "hex": value.imag.hex()},
            }
        case torch.dtype():
            return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
        case torch.device():
            return {_TAG: "device", "name": str(value)}
        case torch.Size():
            return encode_items("size", value)
        case list() if type(value) is list:
            return [
                _encode(item, f"{path}[{position}]", rules) for position, item in enumerate(value)
            ]
        case tuple() if type(value) is tuple:
            return encode_items("tuple", value)
        case dict():
            pairs = [
                (
                    _encode(key, f"a key of {path}", rules),
                    _encode(item, f"{path}[{key!r}]", rules),
                )
                for key, item in value.items()
            ]
            return {_TAG: "dict", "items": [each for pair in rules.arrange(pairs) for each in pair]}
    return rules.on_other(value, path)


def _describe_tensor(tensor: torch.Tensor, _where: str) -> Json:
    described: dict[str, Json] = {
        _TAG: "tensor",
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
    }
    readable = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if readable and tensor.numel() <= 16:
        described["values"] = str(tensor.detach().tolist())
    return described


def _describe_type(other: Any, _where: str) -> Json:
    described = {_TAG: "object", "type": _name_of_type(other)}
    if isinstance(other, (numbers.Number, enum.Enum, str, bytes)):
        described["value"] = repr(other)
    return described


def _sort_by_key(pairs: list[tuple[Json, Json]]) -> list[tuple[Json, Json]]:
    return sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))


# Made once: every step describes every option of every group.
_DESCRIBING = _Rules(_describe_tensor, _describe_type, _sort_by_key)


def _not_plain(value: Any, path: str) -> TypeError:
    return TypeError(
        f"{path} is a {_name_of_type(value)}; only plain tensors, numbers, strings, None, dtypes, devices and "
        "lists, tuples and dicts of them can be sent to another rank"
    )


def _name_of_type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
