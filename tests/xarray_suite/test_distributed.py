"""The Zarr tests of xarray.tests.test_distributed."""

from xarray.tests import test_distributed

from tests.xarray_suite.redirect import tests_and_fixtures

globals().update(tests_and_fixtures(test_distributed))
