"""At which URLs are the objects of a store, where a plain GET brings what the store's own client would bring?

Readers that are no client of the store may then ask there. Whatever a client adds to its requests (headers, accounts,
proxies, certificates) and such a reader does not, makes a store one that only its client reads, with the reason.

S3 is asked by URLs that the client itself signs: endpoint, form of the address, region and credentials are its own.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from zarr.core.sync import sync
from zarr.storage import FsspecStore, ObjectStore

from xgpuzarr.errors import ChunkReadError, loaded_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from zarr.abc.store import Store

    type Make = Callable[[Sequence[str]], list[str]]

__all__ = ["ObjectUrls", "object_urls"]

SIGNED_FOR = timedelta(hours=1)
"""How long a signed URL is good for; each is used for one wave of a read."""

PLAIN_URL = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?(/[A-Za-z0-9._-]+)*/?")
"""A URL in which nothing needs an escape, so that all clients write it alike; without name, password or query."""

PROXIES = ("http_proxy", "https_proxy", "all_proxy")

CERTIFICATES = ("CURL_CA_BUNDLE", "AWS_CA_BUNDLE")
"""Variables that name certificates to some clients only."""

S3_ENVIRONMENT = re.compile(
    r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|(DEFAULT_)?REGION|PROFILE|CONFIG_FILE|SHARED_CREDENTIALS_FILE"
    r"|ENDPOINT(_URL)?(_S3)?|ALLOW_HTTP|VIRTUAL_HOSTED_STYLE_REQUEST|CA_BUNDLE|EC2_METADATA_\w+|METADATA_\w+"
    r"|CONTAINER_\w+|WEB_IDENTITY_TOKEN_FILE|ROLE_\w+|EXECUTION_ENV|MAX_ATTEMPTS|RETRY_MODE|PAGER)"
)
"""Variables that a signed URL has gone by, or that change no request; others may add headers to a client's requests."""

OBSTORE_CLIENT = {"allow_http", "timeout", "connect_timeout", "pool_idle_timeout", "pool_max_idle_per_host"}
OBSTORE_S3 = {
    "bucket",
    "region",
    "default_region",
    "endpoint",
    "access_key_id",
    "secret_access_key",
    "token",
    "virtual_hosted_style_request",
    "skip_signature",
}
HTTP_CLIENT = {"timeout"}
S3FS = {
    *("anon", "key", "secret", "token", "username", "password", "profile", "endpoint_url", "use_ssl", "client_kwargs"),
    *("config_kwargs", "cache_regions", "asynchronous", "skip_instance_cache", "max_concurrency", "use_listings_cache"),
    *("default_block_size", "default_fill_cache", "default_cache_type", "listings_expiry_time", "max_paths"),
}
S3FS_CLIENT = {"region_name", "endpoint_url"}
S3FS_CONFIG = {
    *("s3", "signature_version", "region_name", "connect_timeout", "read_timeout", "retries", "max_pool_connections"),
    "tcp_keepalive",
}

SIGNING_ERRORS = {"botocore.exceptions": ("BotoCoreError", "ClientError"), "obstore.exceptions": ("BaseError",)}
"""Errors of clients that sign which are no OSError and no ValueError."""


@dataclass(frozen=True, slots=True)
class ObjectUrls:
    """URLs of a store's objects.

    Attributes
    ----------
    problem
        Why there are none; "" if there are.
    of
        URLs of objects by their keys, in the same order. They may hold a signature: they are for requests, and for no
        message. Raises `ChunkReadError` if the client cannot sign.
    """

    problem: str
    of: Callable[[Sequence[str]], list[str]]


def object_urls(store: Store, path: str) -> ObjectUrls:
    """URLs of the objects of one array.

    Parameters
    ----------
    store
        An open store.
    path
        Path of the array: keys of its objects begin with it, and go on with letters, digits, dots and slashes.
    """
    make: Make | str = "only web servers and S3 are asked without the store's client"
    if type(store) is FsspecStore:
        kind = f"{type(store.fs).__module__}.{type(store.fs).__qualname__}"
        if kind == "fsspec.implementations.http.HTTPFileSystem":
            make = _of_fsspec(store.fs, store.path, path)
        elif kind == "s3fs.core.S3FileSystem":
            make = _of_s3fs(store.fs, store.path)
    elif type(store) is ObjectStore:
        if type(store.store).__name__ == "HTTPStore":
            make = _of_obstore_http(store.store, path)
        elif type(store.store).__name__ == "S3Store":
            make = _of_obstore_s3(store.store)
    if isinstance(make, str):
        return ObjectUrls(make, lambda _: [])
    return ObjectUrls("", make)


def _of_fsspec(file_system: Any, root: str, path: str) -> Make | str:
    from fsspec.implementations import http  # type: ignore[import-untyped]

    if file_system.get_client is not http.get_client:
        return "its file system has a get_client of its own"
    if found := _other(file_system.kwargs, set()) or _other(file_system.client_kwargs, HTTP_CLIENT):
        return f"its file system has {found}, which only its client knows"
    return _below(root.rstrip("/"), path)


def _of_obstore_http(client: Any, path: str) -> Make | str:
    if found := _other(client.client_options, OBSTORE_CLIENT):
        return f"its client has {found}, which only it knows"
    return _below(client.url.rstrip("/"), path)


def _below(root: str, path: str) -> Make | str:
    url = f"{root}/{path}"
    if not PLAIN_URL.fullmatch(url) or {".", ".."} & {*url.split("/")}:
        return "its URL has characters that clients write in different ways, a query, or a password"
    return _problem(url) or (lambda keys: [f"{root}/{key}" for key in keys])


def _of_obstore_s3(client: Any) -> Make | str:
    import obstore
    from obstore.store import S3Store

    config: Any = dict(client.config)
    if found := _other(client.client_options, OBSTORE_CLIENT) or _other(config, OBSTORE_S3):
        return f"its client has {found}, which only it knows"
    is_unsigned = str(config.pop("skip_signature", "false")).lower() in ("1", "true", "on", "yes", "y")
    if is_unsigned:  # the address is that of a URL signed with a key that is none
        config |= {"access_key_id": "none", "secret_access_key": "none"}
        client = S3Store(config=config, prefix=client.prefix, client_options=client.client_options)

    def urls(keys: Sequence[str]) -> list[str]:
        with _signing(client):
            signed = list(obstore.sign(client, "GET", list(keys), SIGNED_FOR))
        return [url.partition("?")[0] for url in signed] if is_unsigned else signed

    return _s3_problem(str(config.get("endpoint", "https:"))) or urls


def _of_s3fs(file_system: Any, root: str) -> Make | str:
    options = file_system.storage_options
    if file_system.storage_args or file_system.req_kw or file_system.s3_additional_kwargs or file_system.version_aware:
        return "its file system adds to requests what only its client knows"
    if found := (
        _other(options, S3FS)
        or _other(file_system.client_kwargs, S3FS_CLIENT)
        or _other(file_system.config_kwargs, S3FS_CONFIG)
    ):
        return f"its file system has {found}, which only its client knows"

    async def sign(keys: Sequence[str]) -> list[str]:
        seconds = int(SIGNED_FOR.total_seconds())
        return [await file_system._url(f"{root}/{key}", expires=seconds) for key in keys]  # noqa: SLF001  # url() waits

    def urls(keys: Sequence[str]) -> list[str]:
        with _signing(file_system):
            return sync(sign(keys))

    endpoint = file_system.endpoint_url or file_system.client_kwargs.get("endpoint_url") or "https:"
    return _s3_problem("http:" if not file_system.use_ssl else endpoint) or urls


def _s3_problem(endpoint: str) -> str:
    if others := [name for name in os.environ if name.startswith("AWS_") and not S3_ENVIRONMENT.fullmatch(name)]:
        return f"the environment has {min(others)}, which only its client knows"
    return _problem(endpoint)


def _problem(url: str) -> str:
    """What of the environment some clients look at, and others do not."""
    if names := [name for name in os.environ if name.lower() in PROXIES and os.environ[name]]:
        return f"the environment has {min(names)}, which clients take in different ways"
    if url.startswith("https:") and (names := [name for name in CERTIFICATES if os.environ.get(name)]):
        return f"the environment has {names[0]}, which not all clients look at"
    return ""


def _other(options: Iterable[str] | None, known: set[str]) -> str:
    """Names of options that are not known, in a few words; "" if there are none. Values may be secrets."""
    names = sorted(str(name) for name in options or () if name not in known)
    return f"the option {names[0]}" if names else ""


@contextmanager
def _signing(client: Any) -> Generator[None]:
    """Make one clear error of what a client raises when it cannot sign."""
    try:
        yield
    except _signing_errors() as error:
        raise ChunkReadError(
            f"store of {type(client).__name__}: its client signs no URLs ({type(error).__name__}); look at its "
            "credentials, or read with remote_reader='client'"
        ) from error


def _signing_errors() -> tuple[type[BaseException], ...]:
    """What a client raises that cannot sign."""
    return (OSError, ValueError, *loaded_errors(SIGNING_ERRORS))
