from __future__ import annotations

import json

from lastcall.kube.jobs import suspension


def test_what_kubectl_streams_is_read_one_object_at_a_time() -> None:
    pretty = json.dumps({"type": "ADDED", "object": {"a": {"b": 1}}}, indent=4).splitlines(keepends=True)
    lines = [*pretty[:-1], pretty[-1] + "\n", '{"type": "DELETED"}\n', "}\n", "[1]\n", "{broken}\n", "{\n"]
    assert [found["type"] for found in suspension.documents(lines)] == ["ADDED", "DELETED"]
