"""The old name of deferred_params, until its users outside of this folder have the new one."""

from ballast.wrapper.deferred_params import expect as expect
from ballast.wrapper.deferred_params import expect_buffers as expect_buffers
from ballast.wrapper.deferred_params import require_expected as require_expected
