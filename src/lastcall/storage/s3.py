"""A bucket of S3, or of a compatible store (MinIO, Ceph, R2, GCS with interoperability keys).

Credentials, region and endpoint are found as boto3 finds them: variables, profiles, a service account's
token, the machine's role. AWS_S3_ENDPOINT, as OpenShift AI's data connections call it, counts as
AWS_ENDPOINT_URL does.

Discarded: the checksums that boto3 adds automatically, since many stores other than AWS's refuse them; every
byte has our own digest, which is checked when it is downloaded.
"""

from __future__ import annotations

import contextlib
import email.utils
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lastcall import errors, installing, settings
from lastcall.storage.daemons import Daemons
from lastcall.storage.files import Moved, nothing

_PART = 16 * 1024 * 1024
_MOST_PARTS = 9_000  # S3 allows 10,000
_AT_ONCE = 8  # parts in transfer
_LARGEST_COPY = 5 * 1024**3  # for one copy request; not every store can copy in parts
_NOT_THERE = ("404", "NoSuchKey", "NotFound")
_FOR_GOOD = {  # what a retry does not fix, and what the user can do about it
    "NoSuchBucket": "there is no such bucket. Create it, or name another",
    "AccessDenied": "these credentials lack a permission. They need to list, read, write and delete there",
    "403": "these credentials lack a permission. They need to list, read, write and delete there",
    "InvalidAccessKeyId": "unknown AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID",
    "ExpiredToken": "AWS_SESSION_TOKEN has expired",
    "InvalidBucketName": "not a valid bucket name",
}


class Bucket:
    def __init__(self, bucket: str, prefix: str, keys: str | None = None) -> None:
        """`keys`: a folder where a secret with the credentials is mounted, if there is one."""
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        try:
            import boto3
            import botocore.config
            import botocore.exceptions
            from boto3.exceptions import Boto3Error
            from boto3.s3.transfer import S3Transfer, TransferConfig
            from s3transfer.futures import NonThreadedExecutor  # type: ignore[import-untyped]
            from s3transfer.manager import TransferManager  # type: ignore[import-untyped]
        except ImportError as error:
            settings.fail(installing.missing(self.url, f"boto3 ({error})", "s3"))
        self._errors: tuple[type[Exception], ...] = (
            botocore.exceptions.BotoCoreError,
            botocore.exceptions.ClientError,
            Boto3Error,
        )
        self._never = (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError)
        self._invalid = (
            botocore.exceptions.ParamValidationError
        )  # detected before anything is sent: an invalid bucket name, a missing key
        self._transfer = S3Transfer

        def manager(part: int, *, threads: bool = True) -> Any:
            """boto3's own starts threads that the interpreter waits for at exit."""
            config = TransferConfig(
                multipart_threshold=part, multipart_chunksize=part, max_concurrency=_AT_ONCE
            )
            return TransferManager(
                self._client, config, executor_cls=Daemons if threads else NonThreadedExecutor
            )

        self._manager = manager
        said = settings.s3_connection(keys)
        endpoint = (
            said.get("AWS_S3_ENDPOINT") or said.get("AWS_ENDPOINT_URL_S3") or said.get("AWS_ENDPOINT_URL")
        )
        config = botocore.config.Config(
            retries={"mode": "standard", "max_attempts": 4},
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=4 * _AT_ONCE,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"} if endpoint else {},
        )
        try:
            session = boto3.session.Session(
                aws_access_key_id=said.get("AWS_ACCESS_KEY_ID"),
                aws_secret_access_key=said.get("AWS_SECRET_ACCESS_KEY"),
                aws_session_token=said.get("AWS_SESSION_TOKEN"),
                region_name=said.get("AWS_DEFAULT_REGION"),
            )
            region = session.region_name or ("us-east-1" if endpoint else None)
            self._client: Any = session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
        except (*self._errors, ValueError) as error:
            # nothing was sent yet: an invalid profile, region or address
            raise errors.StorageRefused(f"{self.url}: {error}") from error

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def names(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        with self._translated("cannot be listed"):
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._key(prefix)
            ):
                for item in page.get("Contents", ()):
                    found[item["Key"].removeprefix(self._key(""))] = item["Size"]
        return found

    def read(self, name: str, largest: int) -> bytes | None:
        with self._translated(f"{name} cannot be read"):
            answer = self._asked(self._client.get_object, name)
            if answer is None:
                return None
            if answer["ContentLength"] > largest:
                raise errors.StorageError(f"{self.url}/{name} has more than {largest} bytes")
            data: bytes = answer["Body"].read()
        return data

    def write(self, name: str, data: bytes) -> None:
        with self._translated(f"{name} cannot be written"):
            self._client.put_object(Bucket=self.bucket, Key=self._key(name), Body=data)

    def send(self, path: Path, name: str, moved: Moved = nothing, *, threads: bool = True) -> None:
        with self._translated(f"{name} cannot be written"):
            part = max(_PART, -(-path.stat().st_size // _MOST_PARTS))
            with self._manager(part, threads=threads) as manager:
                self._transfer(manager=manager).upload_file(
                    str(path), self.bucket, self._key(name), callback=moved
                )

    def fetch(self, name: str, path: Path, moved: Moved = nothing) -> None:
        with self._translated(f"{name} cannot be read"), self._manager(_PART) as manager:
            self._transfer(manager=manager).download_file(
                self.bucket, self._key(name), str(path), callback=moved
            )
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def copy(self, old: str, new: str) -> None:
        with self._translated(f"{old} cannot be copied"):
            with self._manager(_LARGEST_COPY) as manager:
                manager.copy(
                    {"Bucket": self.bucket, "Key": self._key(old)}, self.bucket, self._key(new)
                ).result()

    def remove(self, names: Iterable[str]) -> None:
        with self._translated("cannot be deleted from"):
            # one by one: not every store supports the batch request, and some require a checksum for it
            for name in names:
                self._client.delete_object(Bucket=self.bucket, Key=self._key(name))

    def age(self, name: str) -> float | None:
        with self._translated(f"{name} cannot be looked at"):
            answer = self._asked(self._client.head_object, name)
            if answer is None:
                return None
        now = email.utils.parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        age: float = (now - answer["LastModified"]).total_seconds()
        return max(0.0, age)

    def _asked(self, request: Callable[..., dict[str, Any]], name: str) -> dict[str, Any] | None:
        """The metadata of an object; None if it does not exist."""
        try:
            return request(Bucket=self.bucket, Key=self._key(name))
        except self._errors as error:
            if _code(error) in _NOT_THERE:
                return None
            raise

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            why = _FOR_GOOD.get(_code(error))
            if isinstance(error, self._invalid):
                why = str(error)
            if isinstance(error, self._never):
                why = (
                    "no credentials found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or another "
                    "source that boto3 supports"
                )
            # Without the cause: boto3's and urllib3's own are 140 lines, and say no more than the last of
            # them.
            if why is not None:
                raise errors.StorageRefused(f"{self.url}: {what}: {why}") from None
            raise errors.StorageError(f"{self.url}: {what}: {error}") from None
        except OSError as error:  # of the file here
            raise errors.StorageError(f"{self.url}: {what}: {error}") from error


def _code(error: Exception) -> str:
    answer = (
        getattr(error, "response", None)
        or getattr(error.__cause__ or error.__context__, "response", None)
        or {}
    )
    return str(answer.get("Error", {}).get("Code", ""))
