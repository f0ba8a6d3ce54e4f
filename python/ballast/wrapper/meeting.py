"""The old name of process_groups, until its users outside of this folder have the new one."""

from ballast.wrapper.process_groups import connect_groups as meet
from ballast.wrapper.process_groups import rank_in_job as rank_in_job

__all__ = ["meet", "rank_in_job"]
