"""The old name of custom_optimizer, until its users outside of this folder have the new one."""

from ballast.wrapper.custom_optimizer import shape_of as shape_of
from ballast.wrapper.custom_optimizer import updates_of as updates_of
