"""A protobuf message as plain JSON values, under the field names of the .proto file.

Unlike protobuf's own JSON: every field is there, 64-bit integers are numbers, NaN is null, and a
float32 has no more digits than it needs.
"""

import base64
import json
import math
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Json = dict[str, Any]
Field = Any  # a FieldDescriptor; the stubs have two unrelated classes of that name


def as_json(message: Message) -> Json:
    """Fields without a value are left out only where that means something: messages, optionals."""
    fields: Json = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value: Any = getattr(message, field.name)
        fields[field.name] = _field(field, value)
    return fields


def print_json(message: Message) -> None:
    print(json.dumps(as_json(message), ensure_ascii=False))


def _field(field: Field, value: Any) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {str(key): _value(kind.fields_by_name["value"], value[key]) for key in value}
    return [_value(field, one) for one in value] if field.is_repeated else _value(field, value)


def _value(field: Field, value: Any) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            return as_json(value)
        case FieldDescriptor.TYPE_ENUM:
            known = field.enum_type.values_by_number.get(value)
            return value if known is None else known.name
        case FieldDescriptor.TYPE_BYTES:
            return base64.b64encode(value).decode()
        case FieldDescriptor.TYPE_FLOAT:
            # The shortest digits that give the same float32.
            return _finite(float(str(np.float32(value))))
        case FieldDescriptor.TYPE_DOUBLE:
            return _finite(value)
        case _:
            return value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
