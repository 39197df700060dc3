"""lastcall kube: the admission webhook and its installation, the same change to a file, and jobs in a
cluster."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lastcall
from lastcall import errors, installing, settings
from lastcall.cli import output
from lastcall.cli.kube import files, jobs
from lastcall.kube.inject import package_volume

_EXAMPLES = """examples:
  lastcall kube manifest | kubectl apply -f -             # install the webhook
  lastcall kube inject -f job.yaml | kubectl apply -f -   # or change a file
  lastcall kube pause job/train                           # it saves and stops

With the webhook, this annotation protects a job: lastcall.dev/enabled: "true"
"""
_WEBHOOK_EXAMPLES = """examples:
  lastcall kube webhook --tls-cert tls.crt --tls-key tls.key
  lastcall kube webhook --ca-cert ca.crt --ca-key ca.key --name lastcall.svc
"""
_COPY_EXAMPLES = """examples:
  lastcall kube copy /lastcall
"""
_COPY_JSON = {
    "directory": "the absolute path of the folder",
    "version": "the version of lastcall that is in it now",
}
_GROUPS = {
    "Jobs in a cluster": ("status", "pause", "resume"),
    "Protect jobs": ("manifest", "inject"),
    "What runs in the cluster": ("webhook", "copy"),
}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "kube",
        description="Kubernetes: one annotation protects a job.",
        epilog=_EXAMPLES,
        groups=_GROUPS,
    )
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    _add_webhook(commands)
    files.add(commands)
    jobs.add(commands)
    _add_copy(commands)


def _add_webhook(commands: Any) -> None:
    parser = commands.add_parser(
        "webhook",
        help="serve the admission webhook",
        description="Serves the admission webhook over TLS: /mutate, /healthz, /readyz, /metrics. `lastcall "
        "kube manifest` prints the objects that run it in a cluster. Its log is JSON lines on stderr.",
        epilog=_WEBHOOK_EXAMPLES,
    )
    parser.add_argument("--host", default="", help="the address to listen on (default: all)")
    parser.add_argument(
        "--port", type=_port, default=8443, help="the port to listen on; 0: any free port (default: 8443)"
    )
    parser.add_argument(
        "--image",
        help="the image that pods copy the lastcall package from; if not given, their own images "
        "must have it",
    )
    own = parser.add_argument_group("serve a certificate signed here with this authority, and renew it")
    own.add_argument("--ca-cert", metavar="FILE", type=Path, help="the certificate of the authority")
    own.add_argument("--ca-key", metavar="FILE", type=Path, help="its private key")
    own.add_argument(
        "--name",
        metavar="HOST",
        action="append",
        help="a name or address by which the API server reaches the webhook",
    )
    given = parser.add_argument_group("serve an existing certificate, reloaded when its files change")
    given.add_argument("--tls-cert", metavar="FILE", type=Path, help="the certificate")
    given.add_argument("--tls-key", metavar="FILE", type=Path, help="its private key")
    api = parser.add_argument_group(
        "the API server to read annotations of namespaces from (default: the pod's)"
    )
    api.add_argument("--api-server", metavar="URL", help="its address")
    api.add_argument("--api-token", metavar="FILE", type=Path, help="the token to present to it")
    api.add_argument("--api-ca", metavar="FILE", type=Path, help="the authority of its certificate")
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="DEBUG also logs unchanged objects",
    )
    parser.set_defaults(call=webhook)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port. For example: 8443")
    return int(text)


def _add_copy(commands: Any) -> None:
    parser = commands.add_parser(
        "copy",
        help="copy the package into a folder, for containers whose image lacks it",
        description="Copies the package into a folder, as the init container of an annotated pod does.",
        epilog=_COPY_EXAMPLES,
    )
    parser.add_argument("target", metavar="DIR", type=Path, help="the folder; created if it does not exist")
    output.add_json(parser, _COPY_JSON)
    parser.set_defaults(call=copy)


def copy(args: argparse.Namespace) -> int:
    package_volume.copy(args.target)
    if args.json:
        output.document({"directory": os.path.abspath(args.target), "version": lastcall.__version__})
    else:
        output.say(f"{args.target}: lastcall {lastcall.__version__} is copied")
    return 0


def webhook(args: argparse.Namespace) -> int:
    try:
        from lastcall.kube.webhook import logs, server, tls
    except ImportError as error:
        raise errors.LastcallError(installing.missing("the webhook", str(error.name), "kube")) from None
    from lastcall.kube.inject.inject import InjectOptions

    source = _source(args, tls)
    try:
        holder = tls.Serving(source)
    except ValueError as error:  # ssl.SSLError is an OSError
        settings.fail(f"{source.certificate} and {source.key} cannot be served: {error}")
    logs.start(args.log_level)
    server.run(InjectOptions(image=args.image), holder, _api(args), server.Address(args.host, args.port))
    return 0


def _source(args: argparse.Namespace, serving: Any) -> Any:
    own, given = (args.ca_cert, args.ca_key, args.name), (args.tls_cert, args.tls_key)
    if all(own) and not any(given):
        return serving.Own(args.ca_cert, args.ca_key, tuple(args.name))
    if not all(given) or any(own):
        settings.fail(
            "the API server only calls webhooks over TLS. Give --ca-cert, --ca-key and --name, or --tls-cert "
            "and "
            "--tls-key. The objects that `lastcall kube manifest` prints do so."
        )
    return serving.Given(args.tls_cert, args.tls_key)


def _api(args: argparse.Namespace) -> Any:
    from lastcall.kube.webhook import namespaces

    if args.api_server is None:
        return namespaces.in_cluster(os.environ)
    return namespaces.Api(args.api_server, args.api_token, args.api_ca)
