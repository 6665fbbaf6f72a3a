"""The Zarr tests of xarray.tests.test_backends."""

from xarray.tests import test_backends

from tests.xarray_suite.redirect import tests_and_fixtures

globals().update(tests_and_fixtures(test_backends))
