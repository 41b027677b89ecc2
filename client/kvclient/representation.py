"""How a block's bytes are to be read, as values, and their way into messages."""

from __future__ import annotations

from dataclasses import fields

from kvproto.kv.v1 import representation_pb2
from kvservice.core.representation import Identity, Part, Shape

__all__ = ["Identity", "Part", "Shape", "identity_message", "part_message"]


def identity_message(identity: Identity) -> representation_pb2.Identity:
    """Return the message of an identity; the fields bear the same names."""
    return representation_pb2.Identity(
        **{item.name: getattr(identity, item.name) for item in fields(identity)}
    )


def part_message(part: Part) -> representation_pb2.Part:
    """Return the message of a part with its shape; the fields bear the same names."""
    plain = {item.name: getattr(part, item.name) for item in fields(part) if item.name != "shape"}
    shape = {item.name: getattr(part.shape, item.name) for item in fields(part.shape)}
    return representation_pb2.Part(shape=representation_pb2.Shape(**shape), **plain)
