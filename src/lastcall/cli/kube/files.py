"""`lastcall kube manifest` and `lastcall kube inject`: Kubernetes objects in files."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lastcall
from lastcall import errors, installing, settings
from lastcall.cli import output
from lastcall.kube.inject import annotations as noted
from lastcall.kube.inject import inject as injecting
from lastcall.kube.inject import kinds
from lastcall.kube.inject.annotations import AnnotationError
from lastcall.kube.inject.draft import applied, at
from lastcall.kube.inject.inject import Injection

_IMAGE = f"lastcall:{lastcall.__version__}"
_MANIFEST_EXAMPLES = """examples:
  lastcall kube manifest | kubectl apply -f -
  lastcall kube manifest --format helm --output webhook
"""
_INJECT_EXAMPLES = """examples:
  lastcall kube inject -f job.yaml | kubectl apply -f -
  lastcall kube inject -f job.yaml --diff
"""
_MANIFEST_JSON = {
    "apiVersion": "v1, without --output: that document is for kubectl and has no schema",
    "kind": "List, without --output",
    "items": "the objects, without --output",
    "directory": "the folder, with --output",
    "files": "the names of the files in it, with --output",
}
_INJECT_JSON = {
    "objects": "one entry for each object of the file",
    "objects[].object": "its kind and name",
    "objects[].because": "why it is changed, or why not",
    "objects[].protected": "whether it comes out protected",
    "objects[].patch": "the changes, as a JSON patch",
    "objects[].warnings": "what to look at",
}
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "manifest",
        help="print the objects that install the webhook",
        description="Prints the objects that install the webhook, including a certificate authority and its "
        "key.",
        epilog=_MANIFEST_EXAMPLES,
    )
    parser.add_argument("--namespace", default="lastcall", help="the namespace to run in (default: lastcall)")
    parser.add_argument(
        "--image",
        default=_IMAGE,
        help=f"an image with lastcall[kube] in it, for the webhook and for pods (default: {_IMAGE})",
    )
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the webhook (default: 2)")
    ca = parser.add_mutually_exclusive_group()
    ca.add_argument(
        "--ca-from",
        metavar="FILE",
        help="reuse the authority of an earlier manifest or Secret; - reads standard input",
    )
    ca.add_argument(
        "--cert-manager", action="store_true", help="let cert-manager issue and renew the certificate"
    )
    parser.add_argument(
        "--format",
        choices=("yaml", "kustomize", "helm"),
        default="yaml",
        help="yaml to stdout, or files of a kustomize base or a Helm chart (default: yaml)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="the folder for the files of a kustomize base or a Helm chart",
    )
    output.add_json(parser, _MANIFEST_JSON, "print a List for kubectl; with --output, the names of the files")
    parser.set_defaults(call=manifest)
    parser = commands.add_parser(
        "inject",
        help="apply the webhook's change to a file",
        description="Prints the objects in a file as the webhook would change them, for users who may not "
        "install a webhook.",
        epilog=_INJECT_EXAMPLES,
    )
    parser.add_argument(
        "-f", "--filename", metavar="FILE", required=True, help="YAML or JSON; - reads standard input"
    )
    parser.add_argument(
        "--image",
        help="an image with lastcall, for an init container; if not given, the pods' own images must have it",
    )
    parser.add_argument("--diff", action="store_true", help="print only the changes, not the objects")
    output.add_json(parser, _INJECT_JSON)
    parser.set_defaults(call=inject)


def manifest(args: argparse.Namespace) -> int:
    formats = _formats()
    from lastcall.kube.install import manifests
    from lastcall.kube.webhook import certificates

    if args.format != "yaml" and args.output is None:
        settings.fail(f"--format {args.format} writes several files. Choose a folder: --output webhook")
    if args.format == "yaml" and args.output is not None:
        settings.fail(
            "--output needs a format of several files: --format kustomize or --format helm; plain "
            "yaml goes to stdout"
        )
    if len(args.namespace) > 63 or not _NAMESPACE.fullmatch(args.namespace):
        settings.fail(
            f"--namespace {args.namespace!r} is not the name of a namespace. For example: "
            "--namespace lastcall"
        )
    _check_image(args.image)
    if args.replicas < 1:
        settings.fail(f"--replicas {args.replicas} is less than 1. For example: --replicas 2")
    authority = (
        None if args.cert_manager else _authority(args, formats) if args.ca_from else certificates.authority()
    )
    installation = manifests.Installation(args.image, args.namespace, args.replicas, authority)
    if args.format == "yaml":
        objects = manifests.objects(installation)
        if args.json:
            output.write(
                json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2)
            )  # for kubectl: its schema, not ours
        else:
            sys.stdout.write(formats.text(objects))
        return 0
    files = formats.kustomize(installation) if args.format == "kustomize" else formats.helm(installation)
    _write(args.output, files)
    if args.json:
        output.document({"directory": str(args.output), "files": sorted(files)})
    else:
        output.say(
            f"{args.output}: {output.plural(len(files), 'file')}. They contain the authority's "
            "private key: keep them secret."
        )
    return 0


def inject(args: argparse.Namespace) -> int:
    formats = _formats()
    if args.image is not None:
        _check_image(args.image)
    documents = _documents(args.filename, formats)
    options = injecting.InjectOptions(image=args.image)
    found = _objects(documents)
    defaults = _namespaces([obj for _, obj in found])
    made = [
        _injected(obj, place, options, defaults.get(str(at(obj, ("metadata", "namespace")))))
        for place, obj in found
    ]
    for place, _, injection in made:
        for warning in injection.warnings:
            sys.stderr.write(f"lastcall: {place}: {warning}\n")
    _say_unprotected(args.filename, made)
    if args.json:
        output.document({"objects": [_told(place, obj, injection) for place, obj, injection in made]})
        return 0
    after = _replaced(documents, [obj for _, obj, _ in made])
    if args.diff:
        before, now = (formats.text(one).splitlines(keepends=True) for one in (documents, after))
        sys.stdout.writelines(
            difflib.unified_diff(before, now, args.filename, f"{args.filename} (protected)")
        )
    else:
        sys.stdout.write(formats.text(after))
    return 0


def _say_unprotected(filename: str, made: list[tuple[str, Any, Injection]]) -> None:
    """Warns about objects that come out unchanged: a user who pipes them into kubectl would think they are
    protected."""
    for place, obj, injection in made:
        if injection.left and not noted.ours(at(obj, ("metadata", "annotations"))):
            add = f'Add to its metadata: annotations: {{{noted.PREFIX}enabled: "true"}}'
            sys.stderr.write(
                f"lastcall: {place} is NOT protected and was left unchanged: {injection.because}. {add}\n"
            )
        elif injection.left and not injection.warnings:
            sys.stderr.write(
                f"lastcall: {place} is NOT protected and was left unchanged: "
                f"{_switched_off(obj) or injection.because}\n"
            )
    if not any(kinds.of(obj) for _, obj, _ in made):
        known = ", ".join(kinds.names())
        sys.stderr.write(
            f"lastcall: no object in {filename} is of a kind that lastcall protects. Supported "
            f"kinds: {known}\n"
        )


def _switched_off(obj: Any) -> str | None:
    found = [
        name
        for name, value in noted.read(at(obj, ("metadata", "annotations"))).items()
        if name.endswith("enabled") and not value
    ]
    return f"{found[0]} switches it off" if found else None


def _check_image(image: str) -> None:
    if image.split() != [image]:
        settings.fail(
            f"--image {image!r} is not an image name. For example: --image registry.example/{_IMAGE}"
        )


def _injected(
    obj: Any, place: str, options: injecting.InjectOptions, namespace: Any
) -> tuple[str, Any, Injection]:
    try:
        injection = injecting.inject(obj, options=options, namespace=namespace)
    except AnnotationError as error:
        settings.fail(f"{place}: {error}")
    except RecursionError:  # an anchor that contains itself
        settings.fail(f"{place} is nested too deeply")
    return place, applied(obj, injection.operations), injection


def _told(place: str, obj: Any, injection: Injection) -> dict[str, object]:
    return {
        "object": place,
        "because": injection.because,
        "protected": not injection.left and kinds.of(obj) is not None,
        "patch": list(injection.operations),
        "warnings": list(injection.warnings),
    }


def _namespaces(objects: list[Any]) -> dict[str, Any]:
    """The annotations of the namespaces in the file, by name: the defaults for the objects that the file puts
    in them."""
    found = [obj for obj in objects if (at(obj, ("apiVersion",)), at(obj, ("kind",))) == ("v1", "Namespace")]
    return {
        str(at(obj, ("metadata", "name"))): at(obj, ("metadata", "annotations"))
        for obj in found
        if at(obj, ("metadata", "name"))
    }


def _objects(documents: list[Any]) -> list[tuple[str, Any]]:
    """Each object with its name for messages; the items of a List one by one."""
    flat = [item for document in documents for item in (_items(document) or [document])]
    return [
        (f"{at(obj, ('kind',)) or 'object'} {at(obj, ('metadata', 'name')) or number}", obj)
        for number, obj in enumerate(flat, 1)
    ]


def _replaced(documents: list[Any], objects: list[Any]) -> list[Any]:
    """The documents with their objects replaced by these."""
    left = iter(objects)
    return [
        {**document, "items": [next(left) for _ in items]} if (items := _items(document)) else next(left)
        for document in documents
    ]


def _items(document: Any) -> list[Any] | None:
    """The items of a List, or of a JobList and the like, which kubectl accepts as well."""
    items = at(document, ("items",))
    return items if str(at(document, ("kind",))).endswith("List") and isinstance(items, list) else None


def _documents(filename: str, formats: Any) -> list[Any]:
    import yaml

    content = _content(filename)
    try:
        documents = [document for document in formats.load(content) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: `!!int x`
        settings.fail(f"{filename} is not YAML: {' '.join(str(error).split())}")
    for document in documents:
        if not isinstance(document, Mapping):
            settings.fail(
                f"{filename} contains something that is not a Kubernetes object: {type(document).__name__}"
            )
    if not documents:
        settings.fail(f"{filename} contains no Kubernetes object")
    return documents


def _content(filename: str) -> str:
    try:
        return sys.stdin.read() if filename == "-" else Path(filename).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        settings.fail(f"{filename} is not text in UTF-8: {error.reason} at byte {error.start}")


def _authority(args: argparse.Namespace, formats: Any) -> Any:
    try:
        return formats.authority_in(_content(args.ca_from))
    except ValueError as error:
        settings.fail(f"--ca-from {args.ca_from}: {error}")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # an existing file that others may read would stay readable
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(content)


def _formats() -> Any:
    try:
        from lastcall.kube.install import formats
    except ImportError as error:
        raise errors.LastcallError(installing.missing("this command", str(error.name), "kube")) from None
    return cast(Any, formats)
