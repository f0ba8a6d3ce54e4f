"""The old name of unwrap, until its users outside of this folder have the new one."""

from ballast.wrapper.unwrap import named_parameters as named_parameters
from ballast.wrapper.unwrap import own_names as own_names
from ballast.wrapper.unwrap import unwrapped as plain
from ballast.wrapper.unwrap import unwrapped_name as plain_name

__all__ = ["named_parameters", "own_names", "plain", "plain_name"]
