"""The two protobuf messages that profiles travel in: pprof's Profile, and Pyroscope's PushRequest around it.

No package that is kept well ships either for Python, so their descriptors are made here, from tables of fields.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_KINDS = {
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}
# Message -> its fields as "NUMBER NAME TYPE", `*` behind the type where it repeats.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "ValueType": ("1 type int64", "2 unit int64"),
    "Label": ("1 key int64", "2 str int64", "3 num int64", "4 num_unit int64"),
    "Sample": ("1 location_id uint64*", "2 value int64*", "3 label Label*"),
    "Mapping": (
        *("1 id uint64", "2 memory_start uint64", "3 memory_limit uint64", "4 file_offset uint64", "5 filename int64"),
        *("6 build_id int64", "7 has_functions bool", "8 has_filenames bool", "9 has_line_numbers bool"),
        "10 has_inline_frames bool",
    ),
    "Line": ("1 function_id uint64", "2 line int64", "3 column int64"),
    "Location": ("1 id uint64", "2 mapping_id uint64", "3 address uint64", "4 line Line*", "5 is_folded bool"),
    "Function": ("1 id uint64", "2 name int64", "3 system_name int64", "4 filename int64", "5 start_line int64"),
    "Profile": (
        *("1 sample_type ValueType*", "2 sample Sample*", "3 mapping Mapping*", "4 location Location*"),
        *("5 function Function*", "6 string_table string*", "7 drop_frames int64", "8 keep_frames int64"),
        *("9 time_nanos int64", "10 duration_nanos int64", "11 period_type ValueType", "12 period int64"),
        *("13 comment int64*", "14 default_sample_type int64", "15 doc_url int64"),
    ),
    "LabelPair": ("1 name string", "2 value string"),
    "RawSample": ("1 rawProfile bytes", "2 ID string"),
    "RawProfileSeries": ("1 labels LabelPair*", "2 samples RawSample*"),
    "PushRequest": ("1 series RawProfileSeries*",),
}
_PACKAGE = "kvtrace.profiles"


def _pool() -> descriptor_pool.DescriptorPool:
    """Return the messages' descriptors in a pool of their own, so that nobody else's are met."""
    file = descriptor_pb2.FileDescriptorProto(name="kvtrace/profiles.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            number, field, kind = text.split()
            added = message.field.add(name=field, number=int(number))
            added.label = added.LABEL_REPEATED if kind.endswith("*") else added.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in _KINDS:
                added.type = _KINDS[kind]
            else:
                added.type, added.type_name = added.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


Profile: Any = _message("Profile")
PushRequest: Any = _message("PushRequest")
