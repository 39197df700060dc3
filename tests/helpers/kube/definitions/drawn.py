"""Objects drawn by Hypothesis from the schema of their kind: valid by it, small, and with what lastcall looks
at more often than with anything else."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from helpers.kube import objects
from helpers.kube.definitions import kinds
from helpers.kube.definitions.checks import BITS, Schema, identity

# Without them an object has no pods.
_ALWAYS = {
    *("spec", "template", "containers", "rayClusterSpec", "rayClusterConfig", "headGroupSpec", "podSets"),
    *("replicatedJobs", "pytorchReplicaSpecs"),
}
_OFTEN = {
    *("workerGroupSpecs", "submitterPodTemplate", "trainer", "runtimePatches", "trainingRuntimeSpec"),
    *("metadata", "annotations", "initContainers", "env", "value", "volumes", "volumeMounts", "emptyDir"),
    *("lifecycle", "preStop", "exec", "command", "args", "resources", "limits", "securityContext"),
    *("terminationGracePeriodSeconds", "restartPolicy", "podFailurePolicy", "nodeSelector"),
}
# by the name of the field, or of the map whose keys they are
_WORDS = {
    "name": [
        *("main", "node", "pytorch", "sidecar", "lastcall", "lastcall-install", "lastcall-storage"),
        *("PYTHONPATH", "LASTCALL_ENABLED", "LASTCALL_EXIT_CODE", "LASTCALL_DIRECTORY"),
    ],
    "manager": ["lastcall.dev/webhook", "mine.dev/it"],
    "mountPath": ["/opt/lastcall", "/mnt/kubeflow-checkpoints", "/mnt/kubeflow-checkpoints/", "/data"],
    "restartPolicy": ["Never", "OnFailure", "Always", "ExitCode"],
    "annotations": ["kubectl.kubernetes.io/default-container", "team"],
    "nodeSelector": ["kubernetes.io/os", "pool"],
    "pytorchReplicaSpecs": ["Master", "Worker"],
    "limits": ["cpu", "memory", "nvidia.com/gpu"],
    "terminationMessagePath": ["/dev/termination-log", "/tmp/said"],
}
_TEXTS = ["", "a", "exec python train.py", "python train.py | tee log", "/a:/b", "yes", "1e3", "ü: #", "-c"]
_DEEPEST = 14  # below it, there is only what is required


_ANNOTATIONS = st.fixed_dictionaries(
    {"lastcall.dev/enabled": st.just("true")},
    optional={
        "lastcall.dev/storage": st.sampled_from(["shared", "shared/a//b/"]),
        "lastcall.dev/directory": st.sampled_from(["/ckpt", "/opt/lastcall", "/data"]),
        "lastcall.dev/grace-seconds": st.sampled_from(["0.5", "90", "604800"]),
        "lastcall.dev/kill-wait-seconds": st.sampled_from(["0", "0.4"]),
    },
)


@st.composite
def items(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Annotated objects of this kind, of any version that is served."""
    schemas = kinds.schemas(kind)
    version = draw(st.sampled_from(sorted(schemas)))
    spec = _Drawing(draw).value(schemas[version]["properties"]["spec"], "spec", 0)
    return objects.made(version, kind, spec, draw(_ANNOTATIONS))


class _Drawing:
    """A value of a schema; `name` is that of the field which it is in.

    Recursion within one strategy: a strategy of its own for each of some hundred values takes seconds.
    """

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def value(self, schema: Schema, name: str, depth: int) -> Any:
        if schema.get("x-kubernetes-int-or-string"):
            return self._draw(_EITHER)
        match schema.get("type", "object"):
            case "object":
                return self._object(schema, name, depth)
            case "array":
                return self._list(schema, name, depth)
            case "integer" | "number":
                bits = BITS.get(schema.get("format", ""), 31)
                least, most = schema.get("minimum", 0), schema.get("maximum", 2**bits - 1)
                return self._draw(st.integers(least, min(most, 2**bits - 1)))
            case "boolean":
                return self._draw(st.booleans())
        return self._draw(_texts(schema, name))

    def _object(self, schema: Schema, name: str, depth: int) -> dict[str, Any]:
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        if isinstance(others, dict):
            words = _WORDS.get(name, ["a", "b"])
            number = self._draw(st.integers(1 if name in _ALWAYS else 0, 2))
            return {word: self.value(others, "", depth + 1) for word in self._chosen(words, number)}
        wanted = [field for field in fields if field in _ALWAYS or field in schema.get("required", ())]
        if depth < _DEEPEST:
            often = [field for field in fields if field in _OFTEN and field not in wanted]
            wanted += self._chosen(often, self._draw(st.integers(0, 5)))
            wanted += self._chosen([field for field in fields if field not in wanted], self._draw(_RARELY))
        rest = [field for field in fields if field not in wanted]
        wanted += rest[: max(0, schema.get("minProperties", 0) - len(wanted))]
        return {field: self.value(fields[field], field, depth + 1) for field in wanted}

    def _list(self, schema: Schema, name: str, depth: int) -> list[Any]:
        least = schema.get("minItems", 1 if name in _ALWAYS else 0)
        number = self._draw(st.integers(least, max(least, min(schema.get("maxItems", 2), 2))))
        found = [self.value(schema["items"], name, depth + 1) for _ in range(number)]
        if (of := identity(schema)) is not None:
            found = list({of(one): one for one in found}.values())
        assert len(found) >= schema.get("minItems", 0), f"{name}: the same was drawn twice"
        return found

    def _chosen(self, words: list[str], number: int) -> list[str]:
        found = self._draw(st.lists(st.integers(0, 1000), min_size=number, max_size=number))
        return list(dict.fromkeys(words[one % len(words)] for one in found if words))


_EITHER = st.sampled_from([0, 1, 250, "1", "500m", "2Gi", "1e3", "0.5"])
_RARELY = st.sampled_from([0, 0, 1])


def _texts(schema: Schema, name: str) -> st.SearchStrategy[str]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("format") == "date-time":
        return st.just("2026-01-01T00:00:00Z")
    least, most = schema.get("minLength", 0), schema.get("maxLength", 1000)
    if "pattern" in schema:
        return (
            st.from_regex(str(schema["pattern"])).map(str.strip).filter(lambda it: least <= len(it) <= most)
        )
    words = [word for word in _WORDS.get(name, _TEXTS) if least <= len(word) <= most]
    return st.sampled_from(words) if words else st.text("ab-", min_size=least, max_size=least + 3)
