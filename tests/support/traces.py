"""Traces of a profiler, made by hand."""

import json

from jax.profiler import ProfileData


def trace(planes):
    """A trace. planes: {plane: {line: [(start in µs, end in µs, name, stats), ...]}}."""
    return ProfileData.from_serialized_xspace(written(planes))


def written(planes):
    """A trace as the bytes of its file."""
    text = ""
    for plane, lines in planes.items():
        events = [event for line in lines.values() for event in line]
        names = list(dict.fromkeys(name for *_, name, _ in events))
        keys = list(dict.fromkeys(key for *_, stats in events for key in stats))
        body = ""
        for table, entries in (("event_metadata", names), ("stat_metadata", keys)):
            for i, entry in enumerate(entries):
                body += f'{table} {{ key: {i + 1} value {{ id: {i + 1} name: "{entry}" }} }}\n'
        for line, events in lines.items():
            body += f'lines {{ name: "{line}"\n'
            for start, end, name, stats in events:
                body += (
                    f"events {{ metadata_id: {names.index(name) + 1} offset_ps: "
                    f"{round(start * 1e6)} "
                )
                body += f"duration_ps: {round((end - start) * 1e6)} "
                for key, value in stats.items():
                    kind = "str_value" if isinstance(value, str) else "int64_value"
                    body += (
                        f"stats {{ metadata_id: {keys.index(key) + 1} {kind}: "
                        f"{json.dumps(value)} }} "
                    )
                body += "}\n"
            body += "}\n"
        text += f'planes {{ name: "{plane}"\n{body}}}\n'
    return ProfileData.text_proto_to_serialized_xspace(text)
