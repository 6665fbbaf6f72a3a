"""Names of dask arrays: different where reads may differ, and the same in every process where that is known."""

from __future__ import annotations

import base64
import datetime as dt
import gc
import json
import os
import subprocess
import sys
import zipfile

import icechunk
import numpy as np
import obstore.store
import pytest
import xarray as xr
import zarr
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.reference import ReferenceFileSystem
from zarr.storage import FsspecStore, MemoryStore, ObjectStore, WrapperStore, ZipStore

import xgpuzarr.store_token
from xgpuzarr import from_zarr
from xgpuzarr.store_token import store_token


def dataset(value):
    return xr.Dataset({"t": ("x", np.full(8, value, "f4"))})


def references(value):
    store = MemoryStore()
    dataset(value).to_zarr(store, zarr_format=2, consolidated=True, encoding={"t": {"compressors": None}})
    encoded = {key: base64.b64encode(found.to_bytes()).decode() for key, found in store._store_dict.items()}
    return {"version": 1, "refs": {key: f"base64:{text}" for key, text in encoded.items()}}


def memory(value):
    store = MemoryStore()
    dataset(value).to_zarr(store, consolidated=False)
    return store


def write_zip(path, value):
    with zipfile.ZipFile(path, "w") as archive:
        for key, content in memory(value)._store_dict.items():
            archive.writestr(key, content.to_bytes())


def token(store):
    return store_token(store, "t", {"shape": [8]})


def assert_reads_both(places, **kwargs):
    """One expression of datasets that differ in nothing but their place."""
    a, b = (xr.open_dataset(place, engine="gpuzarr", device="cpu", chunks={}, **kwargs) for place in places)
    assert a.t.data.name != b.t.data.name
    np.testing.assert_array_equal(xr.concat([a, b], "run").t.values, np.repeat([[1], [2]], 8, axis=1))


@pytest.mark.filterwarnings("ignore:.*asynchronous=True")
def test_zip_files_behind_one_protocol(tmp_path):
    for value in (1, 2):
        write_zip(tmp_path / f"{value}.zip", value)
    assert_reads_both([f"zip://::{tmp_path}/{value}.zip" for value in (1, 2)], consolidated=False)


def test_references(tmp_path):
    datasets = []
    for value in (1, 2):
        (tmp_path / f"{value}.json").write_text(json.dumps(references(value)))
        for place in (references(value), str(tmp_path / f"{value}.json")):
            kwargs = {"zarr_format": 2, "storage_options": {"fo": place}, "consolidated": False}
            ds = xr.open_dataset("reference://", engine="gpuzarr", device="cpu", chunks={}, **kwargs)
            datasets.append(ds)
    assert len({ds.t.data.name for ds in datasets}) == 4
    np.testing.assert_array_equal(xr.concat(datasets, "run").t.values[:, 0], [1, 1, 2, 2])


def test_a_table_of_references_is_hashed_once(monkeypatch):
    file_system = ReferenceFileSystem(fo=references(1), asynchronous=True, skip_instance_cache=True)
    first = token(FsspecStore(file_system))
    monkeypatch.setattr(xgpuzarr.store_token, "_file_system_state", None)
    assert token(FsspecStore(file_system)) == first
    n_known = len(xgpuzarr.store_token._digests)
    del file_system
    gc.collect()
    assert len(xgpuzarr.store_token._digests) < n_known


def test_stores_in_memory():
    assert_reads_both([memory(1), memory(2)], consolidated=False)


def test_names_of_stores_in_memory_never_come_again():
    names = set()
    for value in range(20):
        store = memory(value)
        names.add(from_zarr(store, "t", device="cpu").name)
        del store
        gc.collect()
    assert len(names) == 20


def test_obstore_in_memory():
    stores = [ObjectStore(obstore.store.MemoryStore()) for _ in range(2)]
    for value, store in enumerate(stores, 1):
        dataset(value).to_zarr(store, consolidated=False)
    assert_reads_both(stores, consolidated=False)


@pytest.mark.filterwarnings("ignore:.*asynchronous=True")
def test_fsspec_in_memory():
    dataset(1).to_zarr("memory://token.zarr", consolidated=False)
    names = {from_zarr("memory://token.zarr", "t", device="cpu").name for _ in range(2)}
    assert len(names) == 2


def s3(**options):
    config = {"access_key_id": "name", "secret_access_key": "secret", "region": "us-east-1"}
    client_options = {"timeout": dt.timedelta(seconds=3), "allow_http": True}
    return ObjectStore(obstore.store.S3Store("bucket", config=config, client_options=client_options, **options))


def http(path="x/a.zarr", **options):
    return FsspecStore(HTTPFileSystem(asynchronous=True, skip_instance_cache=True, **options), path=f"http://h/{path}")


@pytest.mark.parametrize("make", [s3, http])
def test_options_of_a_client_count(make):
    options = {s3: [{"endpoint": "http://a"}, {"endpoint": "http://b"}, {"prefix": "a"}]}
    options |= {http: [{"path": "y.zarr"}, {"headers": {"a": "b"}}, {"client_kwargs": {"read_bufsize": 5}}]}
    tokens = [token(make(**chosen)) for chosen in ({}, *options[make])]
    assert len(set(tokens)) == 4
    assert token(make()) == tokens[0]


def test_what_is_not_known_of_an_option_makes_a_name_unique():
    options = {"client_kwargs": {"trace": object()}}
    assert token(http(**options)) != token(http(**options))


def test_unknown_stores_have_unique_names(tmp_path):
    dataset(1).to_zarr(tmp_path / "t.zarr", consolidated=False)
    store = WrapperStore(zarr.storage.LocalStore(tmp_path / "t.zarr", read_only=True))
    assert token(store) != token(store)


def test_passwords_do_not_show():
    assert "secret" not in token(s3())
    assert len(token(s3())) == 32


def test_sessions_of_icechunk():
    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    session = repository.writable_session("main")
    dataset(1).to_zarr(session.store, consolidated=False)
    before = from_zarr(session.store, "t", device="cpu")
    zarr.open_group(session.store)["t"][:] = 2
    after = from_zarr(session.store, "t", device="cpu")
    assert before.name != after.name
    first = session.commit("first")
    session = repository.writable_session("main")
    zarr.open_group(session.store)["t"][:] = 1
    second = session.commit("second")
    stores = [repository.readonly_session(snapshot_id=snapshot).store for snapshot in (second, first)]
    assert_reads_both(stores, consolidated=False)
    assert token(stores[0]) == token(repository.readonly_session(snapshot_id=second).store)


@pytest.mark.parametrize("prefix", ["", "zip://::"])
@pytest.mark.filterwarnings("ignore:.*asynchronous=True")
def test_a_zip_file_written_anew(tmp_path, prefix):
    names = set()
    for value in (1, 2):
        write_zip(tmp_path / "t.zip", value)
        os.utime(tmp_path / "t.zip", ns=(value, value))
        array = from_zarr(f"{prefix}{tmp_path}/t.zip", "t", device="cpu")
        names.add(array.name)
        np.testing.assert_array_equal(array.compute(), np.full(8, value))
    assert len(names) == 2


@pytest.mark.parametrize("kind", ["folder", "url", "obstore"])
@pytest.mark.filterwarnings("ignore:.*asynchronous=True")
def test_a_folder_written_anew(tmp_path, kind):
    path = tmp_path / "t.zarr"
    names = set()
    for value in (1, 2):
        dataset(value).to_zarr(path, consolidated=False, mode="w")
        os.utime(path / "t" / "zarr.json", ns=(value, value))
        store = {"folder": path, "url": f"file://{path}", "obstore": ObjectStore(obstore.store.LocalStore(path))}[kind]
        names.add(from_zarr(store, "t", device="cpu").name)
    assert len(names) == 2


def test_a_folder_with_consolidated_metadata_alone_written_anew(tmp_path):
    names = set()
    for value in (1, 2):
        dataset(value).to_zarr(tmp_path, zarr_format=2, consolidated=True, mode="w")
        (tmp_path / "t" / ".zarray").unlink()
        os.utime(tmp_path / ".zmetadata", ns=(value, value))
        names.add(xr.open_dataset(tmp_path, engine="gpuzarr", device="cpu", chunks={}).t.data.name)
    assert len(names) == 2


def test_names_are_the_same_in_another_process(tmp_path):
    dataset(1).to_zarr(tmp_path / "t.zarr", consolidated=False)
    write_zip(tmp_path / "t.zip", 1)
    places = [str(tmp_path / "t.zarr"), str(tmp_path / "t.zip"), f"zip://::{tmp_path}/t.zip"]
    script = (
        "import sys, warnings; warnings.simplefilter('ignore'); from xgpuzarr import from_zarr\n"
        "for place in sys.argv[1:]: print(from_zarr(place, 't', device='cpu').name)"
    )
    run = [sys.executable, "-c", script, *places]
    first, second = (subprocess.run(run, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second
    assert len(set(first.split())) == 3


def test_a_zip_file_open_for_writing_has_unique_names(tmp_path):
    write_zip(tmp_path / "t.zip", 1)
    with ZipStore(tmp_path / "t.zip", mode="a") as store:
        assert token(store) != token(store)


def test_the_environment_of_clients_and_the_target_of_a_link_count(tmp_path, monkeypatch):
    for name in ("a", "b"):
        zarr.create_array(tmp_path / name, shape=4, dtype="f4", chunks=2)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    first = store_token(zarr.storage.LocalStore(link), "", {})
    link.unlink()
    link.symlink_to(tmp_path / "b")
    assert store_token(zarr.storage.LocalStore(link), "", {}) != first
    store = FsspecStore.from_url("http://127.0.0.1:1/a.zarr")
    first = store_token(store, "", {})
    assert store_token(store, "", {}) == first
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert store_token(store, "", {}) != first
