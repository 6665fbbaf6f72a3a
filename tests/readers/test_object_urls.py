"""Which stores have URLs that a plain GET may ask, which do not, and why; no request is made."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
import s3fs
from fsspec.implementations.http import HTTPFileSystem
from obstore.store import HTTPStore, S3Store
from zarr.storage import FsspecStore, MemoryStore, ObjectStore

from xgpuzarr.errors import ChunkReadError
from xgpuzarr.readers.object_urls import object_urls

KEYS = {"access_key_id": "AKIA", "secret_access_key": "hush"}
S3_KEYS = {"key": "AKIA", "secret": "hush"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


def by_fsspec(url: str = "https://h.org:8/a.zarr", **options: Any) -> FsspecStore:
    file_system = HTTPFileSystem(asynchronous=True, skip_instance_cache=True, **options)
    return FsspecStore(file_system, read_only=True, path=url)


def by_obstore(url: str = "https://h.org:8/a.zarr", **client_options: Any) -> ObjectStore[Any]:
    return ObjectStore(HTTPStore.from_url(url, client_options=client_options), read_only=True)


def by_s3fs(**options: Any) -> FsspecStore:
    file_system = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True, **options)
    return FsspecStore(file_system, read_only=True, path="bucket/a.zarr")


def by_s3_of_obstore(client_options: Any = None, **config: Any) -> ObjectStore[Any]:
    store = S3Store("bucket", prefix="a.zarr", client_options=client_options, config={"region": "eu-west-1", **config})
    return ObjectStore(store, read_only=True)


@pytest.mark.parametrize("store", [by_fsspec(), by_obstore(), by_fsspec("https://h.org:8/a.zarr/")])
def test_http(store: Any) -> None:
    urls = object_urls(store, "t/u")
    assert urls.problem == ""
    assert urls.of(["t/u/c/0/1", "t/u/c/0/2"]) == [f"https://h.org:8/a.zarr/t/u/c/0/{n}" for n in (1, 2)]


TIMEOUT = aiohttp.ClientTimeout(sock_read=10)


@pytest.mark.parametrize(
    "store",
    [by_fsspec(client_kwargs={"timeout": TIMEOUT}), by_fsspec(block_size=5), by_obstore(timeout="9s", allow_http=True)],
)
def test_options_that_change_no_request(store: Any) -> None:
    assert object_urls(store, "t").problem == ""


async def own_client(**_: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        (MemoryStore(), "only web servers and S3"),
        (by_fsspec(headers={"Authorization": "hush"}), "its file system has the option headers"),
        (by_fsspec(client_kwargs={"headers": {"X": "hush"}}), "its file system has the option headers"),
        (by_fsspec(client_kwargs={"trust_env": True}), "its file system has the option trust_env"),
        (by_fsspec(ssl=False), "its file system has the option ssl"),
        (by_fsspec(get_client=own_client), "a get_client of its own"),
        (by_fsspec("https://me:hush@h.org/a.zarr"), "a query, or a password"),
        (by_fsspec("https://h.org/a.zarr?token=hush"), "a query, or a password"),
        (by_fsspec("https://h.org/a b"), "characters that clients write in different ways"),
        (by_fsspec("https://h.org/b/../a"), "characters that clients write in different ways"),
        (by_obstore("https://h.org/a%20b"), "characters that clients write in different ways"),
        (by_obstore(default_headers={"Authorization": "hush"}), "its client has the option default_headers"),
        (by_obstore(proxy_url="http://hush"), "its client has the option proxy_url"),
        (by_s3fs(**S3_KEYS, requester_pays=True), "adds to requests"),
        (by_s3fs(**S3_KEYS, version_aware=True), "adds to requests"),
        (by_s3fs(**S3_KEYS, s3_additional_kwargs={"SSECustomerKey": "hush"}), "adds to requests"),
        (by_s3fs(**S3_KEYS, client_kwargs={"verify": False}), "the option verify"),
        (by_s3fs(**S3_KEYS, config_kwargs={"proxies": {"http": "hush"}}), "the option proxies"),
        (by_s3_of_obstore(**KEYS, request_payer=True), "the option request_payer"),
        (by_s3_of_obstore({"allow_invalid_certificates": True}, **KEYS), "the option allow_invalid_certificates"),
    ],
)
def test_what_only_the_client_reads(store: Any, reason: str) -> None:
    urls = object_urls(store, "t")
    assert reason in urls.problem
    assert "hush" not in urls.problem


def test_names_that_clients_write_in_different_ways() -> None:
    assert "characters" in object_urls(by_fsspec(), "t é").problem
    assert "characters" in object_urls(by_obstore(), "t~1").problem


@pytest.mark.parametrize(
    ("name", "store", "is_problem"),
    [
        ("https_proxy", by_fsspec(), True),
        ("HTTP_PROXY", by_fsspec("http://h.org/a"), True),
        ("ALL_PROXY", by_s3_of_obstore(**KEYS), True),
        ("CURL_CA_BUNDLE", by_fsspec(), True),
        ("CURL_CA_BUNDLE", by_fsspec("http://h.org/a"), False),
        ("AWS_CA_BUNDLE", by_s3fs(**S3_KEYS), True),
        ("AWS_CA_BUNDLE", by_s3fs(**S3_KEYS, endpoint_url="http://h.org"), False),
        ("AWS_REQUEST_PAYER", by_s3_of_obstore(**KEYS), True),
        ("AWS_REQUEST_PAYER", by_fsspec(), False),
        ("AWS_PROFILE", by_s3_of_obstore(**KEYS), False),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, name: str, store: Any, is_problem: bool) -> None:
    monkeypatch.setenv(name, "hush")
    assert (name in object_urls(store, "t").problem) == is_problem
    assert "hush" not in object_urls(store, "t").problem


def test_s3_is_signed_by_its_client() -> None:
    urls = object_urls(by_s3_of_obstore(**KEYS), "t")
    assert urls.problem == ""
    (url,) = urls.of(["t/c/0 1"])
    address, _, query = url.partition("?")
    assert address == "https://s3.eu-west-1.amazonaws.com/bucket/a.zarr/t/c/0%201"
    assert {"X-Amz-Signature", "X-Amz-Credential"} <= {part.split("=")[0] for part in query.split("&")}
    assert "hush" not in url


@pytest.mark.parametrize(
    ("config", "address"),
    [
        ({}, "https://s3.eu-west-1.amazonaws.com/bucket"),
        ({"endpoint": "https://h.org"}, "https://h.org/bucket"),
        ({"virtual_hosted_style_request": True}, "https://bucket.s3.eu-west-1.amazonaws.com"),
    ],
)
def test_s3_without_an_account_is_not_signed(config: dict[str, Any], address: str) -> None:
    urls = object_urls(by_s3_of_obstore(skip_signature=True, **config), "t")
    assert urls.of(["t/c/0"]) == [f"{address}/a.zarr/t/c/0"]


def test_a_client_that_cannot_sign_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("hush")

    monkeypatch.setattr("obstore.sign", refuse)
    with pytest.raises(ChunkReadError, match=r"S3Store: its client signs no URLs \(ValueError\); .*'client'"):
        object_urls(by_s3_of_obstore(**KEYS), "t").of(["t/c/0"])
